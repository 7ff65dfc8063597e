"""Topics of which each message is taken once, by one gateway at a time: what metering and the index of a copy are.

Any number of gateways may run a `LeasedReader` of the same lease. One at a time reads, the others wait until its lease
runs out. A turn:

    1  read  the messages after the stored offset of each part of a topic (a Kafka partition, the Redis stream)
    2  take  one script for each part does something with them and moves the stored offset, unless that was moved
             meanwhile

A crash before or after 2 loses nothing: the next reader goes on from the stored offset. If two read at once, because
the lease ran out during a pause, both start from the same offset; the second one's script does nothing, and it reads
again.
"""

import asyncio
import contextlib
import logging
import uuid
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar

import redis

from penstock.bus.connect import connect_bus
from penstock.bus.contract import FollowedMessage, Follower
from penstock.config.addresses import Addresses
from penstock.config.settings import BusSettings
from penstock.errors import BusUnavailable
from penstock.failpoints import failpoint
from penstock.names import Pipeline
from penstock.redis.client import backoff_pauses, is_away, log_outage, redis_client
from penstock.redis.scripts import RENEW_LEASE

log = logging.getLogger(__name__)

MAX_MESSAGES_PER_READ = 200
"""How many messages of a topic are read at once."""
LEASE_S, READ_TIMEOUT_S = 5.0, 1.0
GATHER_S = 0.25
"""After a turn that read all messages there were, the next one begins this much later: a turn for each message costs
the gateway a tenth of what a request costs it.
"""


class LeasedReader(ABC):
    """Takes the messages of some topics. Used by one thread."""

    work: ClassVar[str]
    """What it does, for the log."""
    points: ClassVar[tuple[str, str]]
    """The failpoints behind the steps."""

    def __init__(self, addresses: Addresses, settings: BusSettings, lease_key: str, places: Mapping[str, str]) -> None:
        """`places` has the key of the stored offsets of each topic."""
        self.pipeline = Pipeline(addresses.pipeline)
        self.bus, self.client = connect_bus(addresses, settings), redis_client(addresses.first_url)
        self._lease_key, self._places, self._token = lease_key, places, uuid.uuid4().hex
        self._offsets: dict[str, dict[str, str]] = {}
        self.followers: dict[str, Follower] = {}
        """By topic; empty until the first turn, and while another reader has the lease."""

    @abstractmethod
    def take_part(self, topic: str, part: str, before: str, messages: Sequence[FollowedMessage]) -> bool:
        """Take the messages of one part of a topic. Return False if another reader did: its stored offset is not
        `before`, and nothing was changed.
        """

    def count_once(self, timeout_s: float = READ_TIMEOUT_S) -> int | None:
        """Wait up to `timeout_s` for messages, take them, and return how many; None while another reader has the lease.

        Raises `BusUnavailable` or `redis.RedisError`; it can be called again at any time.
        """
        if not RENEW_LEASE.run(self.client, [self._lease_key], [self._token, int(LEASE_S * 1000)]):
            self._close_followers()
            return None
        return self.take_new(timeout_s)

    def take_new(self, timeout_s: float) -> int:
        """Do as `count_once`, whoever has the lease."""
        try:
            if not self.followers:
                self._open_followers()
            return sum(self._take_topic(topic, timeout_s / len(self._places)) for topic in self._places)
        except (BusUnavailable, redis.RedisError):
            self._close_followers()
            raise

    def _open_followers(self) -> None:
        for topic, key in self._places.items():
            stored: Any = self.client.hgetall(key)
            self._offsets[topic] = {part.decode(): offset.decode() for part, offset in stored.items()}
            self.followers[topic] = self.bus.follow_topic(topic, self._offsets[topic])

    def _take_topic(self, topic: str, timeout_s: float) -> int:
        if (follower := self.followers.get(topic)) is None:
            return 0  # another reader was ahead in this turn
        found, offsets = follower.read_messages(timeout_s, MAX_MESSAGES_PER_READ), self._offsets[topic]
        failpoint(self.points[0])
        parts: dict[str, list[FollowedMessage]] = {}
        for message in found:
            parts.setdefault(message.partition, []).append(message)
        for part, messages in parts.items():
            if not self.take_part(topic, part, offsets.get(part, ""), messages):
                self._close_followers()
                return 0
            offsets[part] = messages[-1].offset
            failpoint(self.points[1])
        return len(found)

    def _close_followers(self) -> None:
        while self.followers:
            with contextlib.suppress(BusUnavailable):
                self.followers.popitem()[1].close()

    def close(self) -> None:
        """Free the connections. Another reader can go on after `LEASE_S`."""
        self._close_followers()
        self.client.close()


async def read_forever(reader: LeasedReader) -> None:
    """Let a reader take its turns, on a thread, until cancelled. Outages are waited for."""
    thread, loop, waits = ThreadPoolExecutor(1, reader.work), asyncio.get_running_loop(), backoff_pauses()
    try:
        while True:
            try:
                counted = await _finish_before_cancel(loop.run_in_executor(thread, reader.count_once))
            except (BusUnavailable, redis.RedisError) as error:
                if not is_away(error):
                    log_outage(log, f"{reader.work}: {error}")
                await asyncio.sleep(next(waits))
                continue
            waits = backoff_pauses()
            if counted is None:
                await asyncio.sleep(READ_TIMEOUT_S)
            elif 0 < counted < MAX_MESSAGES_PER_READ:
                await asyncio.sleep(GATHER_S)
    finally:
        thread.submit(reader.close)
        thread.shutdown(wait=False)


async def _finish_before_cancel(turn: "asyncio.Future[int | None]") -> int | None:
    """Wait for a turn on the thread; if this is cancelled, wait all the same before raising it."""
    try:
        return await asyncio.shield(turn)
    except asyncio.CancelledError:
        with contextlib.suppress(BusUnavailable, redis.RedisError):
            await turn
        raise
