"""The Lua scripts of the record, called by their hash."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any, cast

import redis
from redis.exceptions import NoScriptError

from penstock.redis.client import replies_once, replies_to

Call = tuple[Sequence[str], Sequence[str | int | bytes]]
"""Keys and arguments."""


@dataclass(frozen=True)
class Script:
    """One script's text, and the hash a server that has seen it knows it by."""

    text: str
    sha: str

    def run(self, client: "redis.Redis", keys: Sequence[str], args: Sequence[str | int | bytes]) -> Any:
        """The script's reply. A server that does not know the script gets its text."""
        values = cast("list[str]", [*keys, *args])
        try:
            return client.evalsha(self.sha, len(keys), *values)
        except NoScriptError:
            return client.eval(self.text, len(keys), *values)

    def command(self, call: Call) -> list[Any]:
        """Return a call as a command, for `run_once`."""
        keys, args = call
        return ["EVALSHA", self.sha, len(keys), *keys, *args]

    def run_once(self, client: "redis.Redis", commands: Sequence[Sequence[Any]]) -> list[Any]:
        """Return the replies to commands of this script, and to others between them that only read, in one round trip.

        Nothing is sent again: see `replies_once`.
        """
        try:
            return replies_once(client, commands)
        except NoScriptError:  # none of them was run
            client.script_load(self.text)
            return replies_once(client, commands)

    def run_all(self, client: "redis.Redis", calls: Sequence[Call]) -> list[Any]:
        """The replies to many calls, in one round trip. Calls may be made twice, where the
        server does not know the script.
        """
        if not calls:
            return []
        try:
            return self._run_all(client, calls)
        except NoScriptError:
            client.script_load(self.text)
            return self._run_all(client, calls)

    def _run_all(self, client: "redis.Redis", calls: Sequence[Call]) -> list[Any]:
        with client.pipeline(transaction=False) as pipe:
            for keys, args in calls:
                self.add(pipe, keys, args)
            return replies_to(pipe)

    def add(self, pipe: "redis.client.Pipeline", keys: Sequence[str], args: Sequence[str | int | bytes]) -> None:
        """One more command of a pipeline."""
        pipe.evalsha(self.sha, len(keys), *cast("list[str]", [*keys, *args]))


def load(name: str) -> Script:
    """The script `lua/<name>.lua`."""
    text = (resources.files("penstock.record") / "lua" / f"{name}.lua").read_text("utf-8")
    return Script(text, hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest())


CLAIM = load("claim")
TAKE = load("take")
REAP = load("reap")
ADOPT = load("adopt")
DISOWN = load("disown")
APPEND = load("append")
FINISH = load("finish")
HANDED = load("handed")
RELEASE = load("release")
RENEW = load("renew")
CANCEL = load("cancel")
