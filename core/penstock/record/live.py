"""Receives live events of token streams, over one pub/sub connection for all streams, for asyncio and for threads.

Redis does not keep what it publishes for later subscribers. So a listener is told when its subscription begins, and
reads the log then.
"""

import asyncio
import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from queue import Empty, SimpleQueue
from typing import Any

import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from penstock.redis.client import REDIS_TIMEOUT_S, async_connection_pool, backoff_pauses

Deliver = Callable[[bytes | None], None]
"""Called with each event's JSON, and with None when the subscription begins, or begins again: events may be missing."""
MAX_MAILBOX_EVENTS = 128
"""The most events that are kept for a slow reader. If more come, all are dropped, and the reader must read the log."""
PING_AFTER_S = 5.0
"""After this time without a message a PING is sent. After as long again without a reply the connection is given up."""


class LiveFeed:
    """Subscribes to channels and passes their events on. Belongs to the event loop on which it was made."""

    def __init__(self, url: str) -> None:
        self._pool = async_connection_pool(url, protocol=2, socket_timeout=None, retry=Retry(NoBackoff(), 0))
        self._connection: Any = self._pool.make_connection()  # type: ignore[no-untyped-call]
        self._connected = False
        self._listeners: dict[str, list[Deliver]] = {}
        self._changed: asyncio.Queue[str] = asyncio.Queue()
        self._num_heard = 0
        self._tasks = [asyncio.create_task(self._read_forever()), asyncio.create_task(self._send_changes())]

    def add_listener(self, channel: str, deliver: Deliver) -> None:
        """Call `deliver` for the channel's events from now on."""
        self._listeners.setdefault(channel, []).append(deliver)
        self._changed.put_nowait(channel)

    def remove_listener(self, channel: str, deliver: Deliver) -> None:
        """Stop calling `deliver` for the channel's events."""
        listeners = self._listeners.get(channel, [])
        if deliver in listeners:
            listeners.remove(deliver)
        if not listeners:
            self._listeners.pop(channel, None)
            self._changed.put_nowait(channel)

    async def close(self) -> None:
        """End both tasks and the connection."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        with suppress(redis.RedisError, OSError):  # awaited, as TLS exchanges messages before it closes
            async with asyncio.timeout(REDIS_TIMEOUT_S):
                await self._connection.disconnect()
                await self._pool.disconnect()

    async def _send_changes(self) -> None:
        """Send subscriptions and unsubscriptions. One that is lost is harmless: a new connection subscribes to all."""
        while True:
            channel = await self._changed.get()
            if self._connected:
                verb = "SUBSCRIBE" if channel in self._listeners else "UNSUBSCRIBE"
                with suppress(redis.RedisError, OSError):
                    await self._connection.send_command(verb, channel)

    async def _read_forever(self) -> None:
        waits = backoff_pauses()
        while True:
            try:
                async with asyncio.timeout(REDIS_TIMEOUT_S):
                    await self._open_connection()
                waits = backoff_pauses()
                await self._receive_messages()
            except (redis.RedisError, OSError):
                self._connected = False
                await self._connection.disconnect(nowait=True)
                await asyncio.sleep(next(waits))

    async def _open_connection(self) -> None:
        await self._connection.connect()
        self._connected = True
        if self._listeners:
            await self._connection.send_command("SUBSCRIBE", *self._listeners)

    async def _receive_messages(self) -> None:
        """Dispatch messages until the connection ends or is found dead."""
        is_asked = False
        while True:
            before = self._num_heard
            with suppress(TimeoutError):
                async with asyncio.timeout(PING_AFTER_S):
                    await self._dispatch_forever()
            is_quiet = self._num_heard == before
            if is_quiet and is_asked:
                raise redis.ConnectionError("the connection is silent")
            if is_quiet:
                await self._connection.send_command("PING")
            is_asked = is_quiet

    async def _dispatch_forever(self) -> None:
        """Dispatch messages until cancelled."""
        # There is no timeout for each message: a thousand streams publish one at each step.
        while True:
            message = await self._connection.read_response(timeout=math.inf, disconnect_on_error=False)
            if message is None:  # the kernel gave it up
                raise redis.ConnectionError("the connection has timed out")
            self._num_heard += 1
            self._dispatch_message(message)

    def _dispatch_message(self, message: Any) -> None:
        if message[0] not in (b"message", b"subscribe"):
            return  # the reply to PING or UNSUBSCRIBE
        _, channel, content = message
        for deliver in self._listeners.get(channel.decode(), ()):
            deliver(content if message[0] == b"message" else None)


class LiveThread:
    """Runs a `LiveFeed` on a thread of its own, for callers without an event loop. Thread-safe."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._loop = asyncio.new_event_loop()
        self._feed: LiveFeed | None = None
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run_loop, name="penstock-live", daemon=True)
        self._thread.start()
        self._started.wait()

    @contextmanager
    def open_mailbox(self, channel: str) -> Iterator["Mailbox"]:
        """Yield a mailbox that gets the channel's events while the context lasts."""
        feed, box = self._feed, Mailbox()
        assert feed is not None, "the feed is made before the thread says that it has started"
        self._loop.call_soon_threadsafe(feed.add_listener, channel, box.put_event)
        try:
            yield box
        finally:
            with suppress(RuntimeError):  # the loop is closed: nothing listens any more
                self._loop.call_soon_threadsafe(feed.remove_listener, channel, box.put_event)

    def close(self) -> None:
        """Stop the thread."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _run_loop(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            self._feed = runner.run(self._make_feed())
            self._started.set()
            self._loop.run_forever()
            runner.run(self._feed.close())

    async def _make_feed(self) -> LiveFeed:
        return LiveFeed(self._url)


class AsyncMailbox:
    """Keeps the events of one listener until they are taken, on one event loop."""

    def __init__(self) -> None:
        self._waiting: list[bytes] = []
        self._missed = False
        self._loop = asyncio.get_running_loop()
        self._taker: asyncio.Future[None] | None = None
        self._due = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def put_event(self, payload: bytes | None) -> None:
        """Keep an event's JSON. After None, or one event too many, the reader has to read the log."""
        if payload is None or len(self._waiting) >= MAX_MAILBOX_EVENTS:
            self._waiting.clear()
            self._missed = True
        if payload is not None:
            self._waiting.append(payload)
        self._wake_taker()

    async def take_events(self, timeout_s: float) -> tuple[list[bytes], bool]:
        """Return the events that wait, and whether events before them may have been missed.

        Wait up to `timeout_s` for the first. If none comes, events may have been missed, too.
        """
        if not self._waiting and not self._missed:
            self._due = self._loop.time() + timeout_s
            if self._timer is None or self._timer.when() > self._due:
                self._set_timer()
            self._taker = self._loop.create_future()
            await self._taker
        taken, missed = self._waiting, self._missed or not self._waiting
        self._waiting, self._missed = [], False
        return taken, missed

    def close(self) -> None:
        """Stop the timer. Nothing may be taken after this."""
        if self._timer is not None:
            self._timer.cancel()

    def _wake_taker(self) -> None:
        if self._taker is not None and not self._taker.done():
            self._taker.set_result(None)

    def _set_timer(self) -> None:
        # One timer serves many waits, most of which end earlier: when it fires, `_check_due` may set it again.
        self.close()
        self._timer = self._loop.call_at(self._due, self._check_due)

    def _check_due(self) -> None:
        self._timer = None
        if self._taker is None or self._taker.done():
            return
        if self._loop.time() < self._due:
            self._set_timer()
        else:
            self._wake_taker()


class Mailbox:
    """Keeps the events of one listener until they are taken, for threads."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[bytes | None] = SimpleQueue()

    def put_event(self, payload: bytes | None) -> None:
        """Keep an event's JSON. After None, or one event too many, the reader has to read the log."""
        if payload is not None and self._queue.qsize() >= MAX_MAILBOX_EVENTS:
            with suppress(Empty):
                while True:
                    self._queue.get_nowait()
            self._queue.put(None)
        self._queue.put(payload)

    def take_events(self, timeout_s: float) -> tuple[list[bytes], bool]:
        """Return the next event, and whether events before it may have been missed.

        Wait up to `timeout_s` for it. If none comes, events may have been missed, too.
        """
        with suppress(Empty):
            payload = self._queue.get(timeout=max(timeout_s, 0))
            return ([], True) if payload is None else ([payload], False)
        return [], True
