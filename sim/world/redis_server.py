"""Redis: fakeredis is the server and runs the product's scripts, and processes have wires to it.

On these, commands and replies are late, lost or cut off. What a client sends is executed by the server's thread of that
wire, in order, whether the client lives then or not. So a crash, a lost command and a lost reply may fall between any
two commands, and what blocks waits in virtual time.
"""

import asyncio
import itertools
from collections.abc import Callable, Iterator, Sequence
from queue import Empty
from typing import Any, cast

import fakeredis
import hiredis
import redis
import redis.asyncio
import redis.exceptions
from fakeredis import _msgs
from fakeredis._commands import SUPPORTED_COMMANDS
from fakeredis._helpers import SimpleError
from fakeredis._socket import FakeSocket
from fakeredis.commands_mixins.scripting_mixin import LUA_MODULE

from penstock.record.append import APPEND
from penstock.record.record import CLAIM, FINISH, TAKE
from sim.world.network import FULL, Link
from sim.world.runtime import SimEvent, SimQueue, World

MEMORY = b"maxmemory:100\r\nused_memory:10\r\n"
"""What a server says of its memory."""
HELLO = [b"*2\r\n$5\r\nHELLO\r\n$1\r\n3\r\n"]
RESET_SHARE = 0.3
"""The share of lost commands and replies whose wire is reset, so that the client need not wait to know it."""

CLAIM_TEXT, TAKE_TEXT = CLAIM.text.encode(), TAKE.text.encode()
WRITER_TEXTS = {APPEND.text.encode(): 4, FINISH.text.encode(): 3}
"""The scripts that write to a log, with the place of the epoch among their keys and arguments."""
OTHERS_SHARE = 0.1
"""How often other clients' commands come between two of one round trip."""


class EpochWatch:
    """Watches the scripts of the record: no epoch is given out twice, and only the newest claim writes.

    The engine's tokens follow from a request, so those of a worker that has lost it would not show in the log.
    """

    def __init__(self) -> None:
        self._newest: dict[bytes, int] = {}
        """By a request's record."""
        self.breaches: list[str] = []

    def note_call(self, script: bytes, words: Sequence[bytes], reply: Any) -> None:
        """Note a call and its reply."""
        if script == CLAIM_TEXT and reply[0] == b"claim":
            self._note_claim(words[0], reply)
        elif script == TAKE_TEXT:
            for name, claim, _ in reply:
                self._note_claim(words[-2].replace(b"%s", name), claim)
        elif script in WRITER_TEXTS and reply == 1:
            epoch = int(words[WRITER_TEXTS[script]])
            if epoch != self._newest.get(words[0]):
                self.breaches.append(f"{words[0].decode()} was written with epoch {epoch}, and it was claimed since")

    def _note_claim(self, record: bytes, claim: Sequence[Any]) -> None:
        _, epoch, _, _, is_ended, *_ = claim
        if not is_ended and epoch <= self._newest.get(record, 0):
            self.breaches.append(f"{record.decode()} was claimed with epoch {epoch} twice")
        self._newest[record] = max(epoch, self._newest.get(record, 0))


class WorldSocket(FakeSocket):
    """The server's end of a wire. A script is compiled once for each server: fakeredis does so for each call, and
    collects garbage after it, which took most of the time of a scene.
    """

    def execute(self, data: bytes, *, is_full: bool = False) -> Iterator[int]:
        """Execute commands, and yield before each its number. hiredis parses them faster than fakeredis does.

        A server whose memory is full refuses them.
        """
        reader = hiredis.Reader()
        reader.feed(data)
        for number in itertools.count():
            fields: Any = reader.gets()
            if fields is False:
                return
            yield number
            if is_full and fields[0] != b"HELLO":
                self.put_response(redis.exceptions.OutOfMemoryError(FULL))
            elif fields[0] == b"INFO":  # which fakeredis does not know
                self.put_response(MEMORY)
            else:
                self._process_command(fields)

    def _xreadgroup(self, *args: Any, **options: Any) -> dict[bytes, Any] | None:
        """Return what is to be read; None where nothing is: for an empty answer fakeredis does not wait."""
        return super()._xreadgroup(*args, **options) or None

    def stop_waiting(self) -> None:
        """Give up a command that waits for data."""
        if self._blocked:
            self._unblock_reason = b"timeout"
            self._db.wake_all()

    def eval(self, script: bytes, numkeys: int, *words: bytes) -> Any:
        """Run a script."""
        lua, state = self._get_server_runtime(self._server), vars(self._server)
        compiled = state.setdefault("compiled", {})
        if script not in compiled:
            compiled[script] = lua.compile(script)
        state["_lua_current_socket"][0] = self
        state["_lua_set_keys_argv"](lua.table_from(words[:numkeys]), lua.table_from(words[numkeys:]))
        self._script_resp = 2
        try:
            reply = self._convert_lua_result(compiled[script](), nested=False)
            state["watch"].note_call(script, words, reply)
            return reply
        except LUA_MODULE.LuaError as error:
            raise SimpleError(_msgs.SCRIPT_ERROR_MSG.format("", error)) from None
        finally:
            self._script_resp = None

    def _lua_redis_call(self, lua_runtime: Any, expected_globals: set[Any], op: bytes, *args: Any) -> Any:
        name = op.decode().lower()
        if name in ("xinfo", "xgroup"):
            name, args = f"{name} {args[0].decode().lower()}", args[1:]
        signature = SUPPORTED_COMMANDS[name]
        words = [arg if isinstance(arg, bytes) else b"%.17g" % arg for arg in args]
        result = self._run_command(getattr(self, signature.func_name), signature, words, True)
        return self._convert_redis_result(lua_runtime, result)


class Wire:
    """A connection, as the client's socket. `link` is the way; without one commands are executed at once."""

    def __init__(self, world: World, server: fakeredis.FakeServer, link: Link | None) -> None:
        self._world, self._link = world, link
        self._server_end = WorldSocket(server, 0, client_class=redis.Redis)
        self._sent = SimQueue(world)
        self.replies = SimQueue(world)
        """What has arrived: replies, and the error that ends the wire."""
        self.has_news = SimEvent(world)
        self._is_closed = False
        if link is not None:
            world.start_thread(world.outside, "redis", lambda: self._serve(link))

    def sendall(self, data: bytes) -> None:
        """Send commands."""
        if self._link is not None:
            self._link.pass_point()
            self._sent.put(data)
            return
        for _ in self._server_end.execute(data):
            pass
        self._take_replies()

    def _serve(self, link: Link) -> None:
        """Execute what arrives, until the client closes the wire, or something on it is lost: then nothing comes any
        more.
        """
        while (data := self._sent.get()) is not None:
            self._world.sleep(link.chance.expovariate(1 / link.delay_s))
            fate = link.chance.random()
            if link.is_cut() or fate < link.loss / 2:
                self._break(link)
                break
            while (stands_s := link.stands_until_s() - self._world.now_s) > 0:
                self._world.sleep(stands_s)
            # Between two commands of a round trip the server may do another client's, and the wire may break.
            last = link.chance.choice([0, 1, 2, 8]) if fate < 0.6 * link.loss else None
            for part in self._server_end.execute(data, is_full=link.is_full()):
                if part == last:
                    break
                if part and link.chance.random() < OTHERS_SHARE:
                    self._world.yield_turn()
            if link.is_cut() or fate < link.loss:
                self._break(link)
                break
            self._world.sleep(link.chance.expovariate(1 / link.delay_s))
            self._take_replies()
        self._server_end.close()

    def _break(self, link: Link) -> None:
        if link.chance.random() < RESET_SHARE:
            self._put_reply(redis.ConnectionError("the connection was reset"))

    def _take_replies(self) -> None:
        queue: Any = self._server_end.responses
        while not queue.empty():
            self._put_reply(queue.get())

    def _put_reply(self, reply: Any) -> None:
        self.replies.put(reply)
        self.has_news.set()

    def shutdown(self, how: int) -> None:
        """Do nothing: `close` follows."""

    def close(self) -> None:
        """Send no more. What was sent is executed, but a command that waits for data is given up."""
        if not self._is_closed:
            self._is_closed = True
            self._sent.put(None)
            self._server_end.stop_waiting()


class WorldConnection(fakeredis.FakeRedisConnection):
    """redis-py's connection, on a wire."""

    def __init__(self, make_wire: Callable[[str], Wire], **options: Any) -> None:
        super().__init__(server=fakeredis.FakeServer(), **options)
        self._make_wire = make_wire

    def __del__(self) -> None:
        """Do nothing: when memory is freed must not change what happens."""

    def _connect(self) -> Any:
        return self._make_wire(self.host)

    def on_connect_check_health(self, check_health: bool = True) -> None:
        """Agree on a protocol. What redis-py tells about itself is left out."""
        if int(self.protocol) == 3:
            cast(Any, self).send_packed_command(HELLO, check_health=False)
            self.read_response()

    def read_response(self, disable_decoding: bool = False, **_: Any) -> Any:
        """Return the next reply, within the time limit of the socket."""
        wire, disconnect = cast(Any, self._sock), cast(Any, self.disconnect)
        if wire is None:
            raise redis.ConnectionError("the connection is closed")
        try:
            reply = wire.replies.get(timeout=self.socket_timeout)
        except Empty:
            disconnect()
            raise redis.TimeoutError("Timeout reading from socket") from None
        if isinstance(reply, redis.ConnectionError):
            disconnect()
        if isinstance(reply, Exception):
            raise reply
        return reply if disable_decoding else self._decode(reply)

    def can_read(self, timeout: float | None = 0) -> bool:
        """Return whether there is something to read within a time."""
        wire: Any = self._sock
        if wire is None:
            self.connect()
            return False
        if wire.replies.empty() and timeout:
            wire.has_news.clear()
            wire.has_news.wait(timeout)
        return not wire.replies.empty()


class RedisServer:
    """One server. The host in an address names who asks."""

    def __init__(self, world: World, find_link: Callable[[str, str], Link | None]) -> None:
        self._world, self._find_link = world, find_link
        self._fake = fakeredis.FakeServer(version=(7,), server_type="valkey")
        self.watch = vars(self._fake)["watch"] = EpochWatch()

    def connection_pool(self, url: str, **options: Any) -> redis.ConnectionPool:
        """Return a pool as `penstock.redis.client.connection_pool` does."""
        made: Any = redis.ConnectionPool.from_url(
            url, connection_class=WorldConnection, make_wire=self._make_wire, **options
        )
        made.url = url
        return made  # type: ignore[no-any-return]

    def _make_wire(self, host: str) -> Wire:
        return Wire(self._world, self._fake, self._find_link(*host.split(".")))


class AsyncClient(redis.asyncio.Redis):
    """`redis.asyncio.Redis`, for which a client with wires asks, each time on a thread of its own."""

    def __init__(self, client: "redis.Redis") -> None:
        super().__init__()
        self.blocking = client

    async def execute_command(self, *args: Any, **options: Any) -> Any:
        """Return the reply to a command."""
        return await asyncio.to_thread(self.blocking.execute_command, *args, **options)

    def pipeline(self, transaction: bool = True, shard_hint: Any = None) -> "redis.asyncio.client.Pipeline":
        """Return a pipeline."""
        return _AsyncPipeline(self, transaction)

    async def aclose(self, close_connection_pool: bool | None = None) -> None:
        """Close the wires."""
        self.blocking.close()


class _AsyncPipeline(redis.asyncio.client.Pipeline):
    def __init__(self, client: AsyncClient, transaction: bool) -> None:
        super().__init__(client.connection_pool, client.response_callbacks, transaction, None)
        self._client = client.blocking

    async def execute(self, raise_on_error: bool = True) -> list[Any]:
        """Return the replies to all commands."""
        commands, self.command_stack = self.command_stack, []
        pipe = self._client.pipeline(transaction=self.is_transaction)
        for words, options in commands:
            cast(Any, pipe).execute_command(*words, **options)
        return list(await asyncio.to_thread(pipe.execute, raise_on_error))
