"""The Lua scripts of the Redis tier's index. A connection shows them to the server as it opens."""

import hashlib
from dataclasses import dataclass
from importlib import resources

from penstock.kvstore.tiers.wire import command
from penstock.names import KV_INDEX

BEGIN = "#!lua flags=allow-oom\n"
"""A server without memory still lets go of what is in it."""


@dataclass(frozen=True)
class Script:
    """One script's text, and the hash a server that has seen it knows it by."""

    text: str
    sha: str

    def call(self, *args: bytes | str | int) -> bytes:
        """The command that runs it on the index; the reply is the script's."""
        return command("EVALSHA", self.sha, len(KV_INDEX), *KV_INDEX, *args)


def load(name: str) -> Script:
    """The script `lua/<name>.lua`, after what all of them begin with."""
    folder = resources.files("penstock.kvstore.tiers") / "lua"
    text = BEGIN + "".join((folder / f"{part}.lua").read_text("utf-8") for part in ("index", name))
    return Script(text, hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest())


TAKE = load("take")
DROP = load("drop")
LEASE = load("lease")
RELEASE = load("release")
USAGE = load("usage")
CHECK = load("check")
ALL = (TAKE, DROP, LEASE, RELEASE, USAGE, CHECK)
