"""Lua scripts: their texts lie in `lua/` folders beside their users, and servers know them by their hash."""

import hashlib
from collections.abc import Callable, Sequence
from importlib import resources
from typing import Any, cast

import redis
import redis.asyncio
from redis.exceptions import NoScriptError

from penstock.redis.client import execute_all, execute_once, raise_first_error, raise_outage

Arguments = Sequence[str | int | float | bytes]
Call = tuple[Sequence[str], Arguments]
"""Keys and arguments."""


class Script:
    """One script's text, and the hash by which a server that has seen the text knows it.

    A server that does not know the script yet is sent its text: it replies `NoScriptError` and has done nothing.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.sha = hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()

    def run(self, client: "redis.Redis", keys: Sequence[str], args: Arguments) -> Any:
        """Return the script's reply."""
        replies = execute_all(client, [self.command(keys, args)])
        if isinstance(replies[0], NoScriptError):
            replies = execute_all(client, [["EVAL", self.text, len(keys), *keys, *args]])
        return raise_first_error(replies)[0]

    async def run_async(self, client: "redis.asyncio.Redis", keys: Sequence[str], args: Arguments) -> Any:
        """Return the script's reply."""
        values = cast("list[str]", [*keys, *args])
        try:
            return await cast("Any", client.evalsha(self.sha, len(keys), *values))
        except NoScriptError:
            return await cast("Any", client.eval(self.text, len(keys), *values))

    def run_all(self, client: "redis.Redis", calls: Sequence[Call]) -> list[Any]:
        """Return the replies to many calls, in one round trip, see `penstock.redis.client.raise_outage`.

        Where the server does not know the script, or the connection breaks, calls may be made twice.
        """
        if not calls:
            return []
        commands = [self.command(*call) for call in calls]
        try:
            return raise_outage(execute_all(client, commands))
        except NoScriptError:
            client.script_load(self.text)
            return raise_outage(execute_all(client, commands))

    def run_once(self, client: "redis.Redis", commands: Sequence[Sequence[Any]]) -> list[Any]:
        """Return the replies to calls of this script, each followed by commands that only read, in one round trip,
        see `penstock.redis.client.raise_outage`.

        No call runs twice, see `penstock.redis.client.execute_once`.
        """
        replies = execute_once(client, commands)
        unknown = [place for place, reply in enumerate(replies) if isinstance(reply, NoScriptError)]
        if unknown:
            # Another client may have sent the text after the first of these calls, so that others did run.
            client.script_load(self.text)
            calls = [place for place, command in enumerate(commands) if command[0] == "EVALSHA"]
            ends = dict(zip(calls, [*calls[1:], len(commands)], strict=True))
            again = [place for call in unknown for place in range(call, ends[call])]
            for place, reply in zip(again, execute_once(client, [commands[place] for place in again]), strict=True):
                replies[place] = reply
        return raise_outage(replies)

    def command(self, keys: Sequence[str | bytes], args: Arguments) -> list[Any]:
        """Return a call as the words of a command."""
        return ["EVALSHA", self.sha, len(keys), *keys, *args]


class ScriptCall:
    """A call of a script that may go with others in a round trip, and its reply."""

    def __init__(
        self, script: Script, keys: Sequence[str], args: Arguments, on_reply: Callable[[Any], None] | None = None
    ) -> None:
        """`on_reply` is called with each reply that is no error."""
        self.script, self.keys, self.args, self._on_reply = script, keys, args, on_reply
        self.reply: Any = None
        """The reply, or the error; None until the call is made."""

    def run(self, client: "redis.Redis") -> None:
        """Make the call. An error that the server replies, or a connection that breaks, is its reply."""
        try:
            self.note_reply(self.script.run(client, self.keys, self.args))
        except redis.RedisError as error:
            self.note_reply(error)

    def note_reply(self, reply: Any) -> None:
        """Note the reply, or the error."""
        self.reply = reply
        if self._on_reply is not None and not isinstance(reply, Exception):
            self._on_reply(reply)

    def read_reply(self) -> Any:
        """Return the reply. Raise it if it is an error."""
        if isinstance(self.reply, Exception):
            raise self.reply
        return self.reply


def run_together(client: "redis.Redis", calls: Sequence[ScriptCall]) -> None:
    """Make calls of several scripts in one round trip. An error of one of them does not touch the others.

    Where the connection breaks, that is the reply of all.
    """
    replies: Sequence[Any]
    try:
        replies = execute_all(client, [call.script.command(call.keys, call.args) for call in calls])
    except redis.RedisError as error:
        replies = [error] * len(calls)
    for call, reply in zip(calls, replies, strict=True):
        if isinstance(reply, NoScriptError):
            call.run(client)
        else:
            call.note_reply(reply)


def load_script(package: str, *names: str) -> Script:
    """Return the script whose text is that of the files `lua/<name>.lua` of a package, one after the other."""
    folder = resources.files(package) / "lua"
    return Script("".join((folder / f"{name}.lua").read_text("utf-8") for name in names))


RENEW_LEASE = load_script("penstock.redis", "renew_lease")
RELEASE_LEASE = load_script("penstock.redis", "release_lease")
