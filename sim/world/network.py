"""The way to the servers: record and bus are doubles in memory, and each call to them may be late, lost or unanswered.

A call is executed at once at the server's moment, and whole. What is lost is the request, which then had no effect, or
the reply: the caller learns in either case that the server did not answer.
"""

import contextlib
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import redis
import redis.exceptions
from confluent_kafka import KafkaException

from penstock.bus.contract import Outgoing, Settlement
from penstock.config.settings import RecordSettings
from penstock.errors import BusUnavailable, PenstockError
from penstock.messages import EndEvent, TokenEvent
from penstock.names import WorkerKind
from penstock.record import AppendOutcome, Claim
from penstock.record.record import Renewed
from penstock.redis.scripts import ScriptCall
from penstock.testing.bus import MemoryBus, MemoryMember, MemoryPublisher
from penstock.testing.record import MemoryRecord, MemoryRecords
from sim.world.runtime import EPOCH_S, World

FULL = "OOM command not allowed when used memory > 'maxmemory'."
TIMEOUT_S = 2.0
"""How long a caller waits for a reply."""


@dataclass(eq=False)
class Link:
    """The way from a process to a server."""

    world: World
    chance: Random
    make_error: Callable[[str], Exception]
    loss: float = 0.0
    """The share of calls that are lost, or whose replies are."""
    delay_s: float = 0.001
    """The mean time of a way."""
    is_cut: Callable[[], bool] = lambda: False
    """Whether nothing comes through now."""
    stands_until_s: Callable[[], float] = lambda: 0.0
    """Until when the server stands still. What it is asked meanwhile it does later, for whom that may be too late."""
    pass_point: Callable[[], object] = lambda: None
    """Called before and after each call is executed: the caller's process may be killed there."""
    is_full: Callable[[], bool] = lambda: False
    """Whether the server executes nothing, as its memory is full."""
    is_busy: bool = False
    """Whether a call is executed, whose own calls are part of it: those are executed at once."""

    @classmethod
    def without_length(cls, world: World) -> "Link":
        """Return a way on which nothing takes time, or is lost."""
        return cls(world, Random(0), make_redis_error, is_busy=True)

    def call(self, execute: Callable[[], Any], *, may_be_late: bool = False, limit_s: float = TIMEOUT_S) -> Any:
        """Execute something at the server. Raises if no reply comes; it may be executed all the same, also later."""
        if self.is_busy:
            return execute()
        self.world.sleep(self.chance.expovariate(1 / self.delay_s))
        fate = self.chance.random()
        if self.is_cut() or fate < self.loss / 2:
            self.world.sleep(limit_s)
            raise self.make_error("no answer: the request was lost")
        stands_s = self.stands_until_s() - self.world.now_s
        if stands_s > limit_s:
            if may_be_late:
                outside = self.world.outside
                self.world.start_thread(outside, "late", lambda: self._execute_late(execute, stands_s))
            self.world.sleep(limit_s)
            raise self.make_error("no answer: the server stands still")
        self.world.sleep(stands_s)
        self.pass_point()
        if self.is_full():
            raise redis.exceptions.OutOfMemoryError(FULL)
        reply = self._execute(execute)
        self.pass_point()
        if fate < self.loss:
            self.world.sleep(limit_s)
            raise self.make_error("no answer: the reply was lost")
        self.world.sleep(self.chance.expovariate(1 / self.delay_s))
        return reply

    def _execute(self, execute: Callable[[], Any]) -> Any:
        self.is_busy = True
        try:
            return execute()
        finally:
            self.is_busy = False

    def _execute_late(self, execute: Callable[[], Any], after_s: float) -> None:
        self.world.sleep(after_s)
        with contextlib.suppress(PenstockError, redis.RedisError, KafkaException):
            self._execute(execute)


def make_redis_error(text: str) -> Exception:
    """Return what Redis' client raises where the server does not answer."""
    return redis.TimeoutError(text)


REMOTE_METHODS = (
    "claim_all", "park_messages", "take_over_free", "finish_all", "note_all_handed_off", "release_claim",
    "release_all", "end_expired_sessions", "find_unnamed_partitions", "adopt_partitions",
    "disown_partitions", "count_free", "cancel_request", "read_log", "read_status",
)  # fmt: skip
"""Methods of the record that ask its server."""


def _make_remote(name: str) -> Callable[..., Any]:
    inner = getattr(MemoryRecord, name)

    @functools.wraps(inner)
    def ask(self: "WorldRecord", *args: Any, **kwargs: Any) -> Any:
        return self.link.call(lambda: inner(self, *args, **kwargs), may_be_late=True)

    return ask


class WorldRecords(MemoryRecords):
    """The server of the records. It has a clock of its own, whoever asks."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self._world = world

    def now_ms(self) -> int:
        """Return the server's time."""
        return int(1000 * (EPOCH_S + self._world.now_s))


class WorldRecord(MemoryRecord):
    """The record, over a link."""

    def __init__(
        self, records: WorldRecords, settings: RecordSettings, link: Link, keys: "redis.Redis | None" = None
    ) -> None:
        """`keys` runs the scripts that go with a renewal."""
        super().__init__(records, settings)
        self.link = link
        self._keys = keys
        self._unsent: list[Sequence[tuple[Claim, TokenEvent]]] = []
        self._fenced: set[Claim] = set()
        """The claims of which the caller knows that a token was refused."""

    def renew_session(
        self, session: str, until_ms: int = 0, partitions: Sequence[str] = (),
        dropped: Sequence[str] = (), beside: Sequence[ScriptCall] = (),
    ) -> Renewed | None:  # fmt: skip
        """Renew a session, and call the scripts beside it."""

        def renew() -> Renewed | None:
            for call in beside:
                assert self._keys is not None, "only who has a server calls its scripts"
                call.run(self._keys)
            return MemoryRecord.renew_session(self, session, until_ms, partitions, dropped)

        renewed: Renewed | None = self.link.call(renew, may_be_late=True)
        return renewed

    def send_tokens(self, entries: Sequence[tuple[Claim, TokenEvent]]) -> None:
        """Send tokens: they are written when the outcomes are collected at the latest."""
        assert self._fenced.isdisjoint(claim for claim, _ in entries), "a request goes on whose tokens were refused"
        self._unsent.append(list(entries))

    def collect_outcomes(self, *, waits: bool = True) -> list[AppendOutcome]:
        """Wait for the outcomes, or return none, as if none had come. Tokens may be written although no reply comes."""
        if not waits and self.link.chance.random() < 0.5:
            return []
        unsent, self._unsent = self._unsent, []
        if not unsent:
            return []

        def write() -> list[AppendOutcome]:
            for entries in unsent:
                MemoryRecord.send_tokens(self, entries)
            return MemoryRecord.collect_outcomes(self)

        outcomes = list(self.link.call(write))
        told = zip((claim for entries in unsent for claim, _ in entries), outcomes, strict=True)
        self._fenced |= {claim for claim, outcome in told if outcome is AppendOutcome.FENCED}
        return outcomes

    def _finish(self, claim: Claim, end: EndEvent, name: str) -> AppendOutcome:
        assert claim not in self._fenced, f"{claim.id} ends, and its tokens were refused"
        return super()._finish(claim, end, name)

    def forget_sent_tokens(self) -> None:
        """Forget them: as after a lost connection, they may be written or not."""
        unsent, self._unsent = self._unsent, []
        if unsent and self.link.chance.random() < 0.5:
            for entries in unsent:
                MemoryRecord.send_tokens(self, entries)
        super().forget_sent_tokens()


for _name in REMOTE_METHODS:
    setattr(WorldRecord, _name, _make_remote(_name))


class WorldMember(MemoryMember):
    """A member of a group, over a link."""

    def __init__(self, bus: MemoryBus, stage: WorkerKind, name: str, link: Link) -> None:
        super().__init__(bus, stage, name)
        self.link = link

    def settle(self, settlements: Sequence[Settlement]) -> None:
        """Settle, if the bus hears of it."""
        self.link.call(lambda: MemoryMember.settle(self, settlements), may_be_late=True)


class WorldPublisher(MemoryPublisher):
    """A publisher, over a link."""

    def __init__(self, bus: MemoryBus, link: Link) -> None:
        super().__init__(bus)
        self.link = link

    def publish(self, messages: Sequence[Outgoing]) -> list[str]:
        """Publish, if the bus hears of it."""
        places: list[str] = self.link.call(lambda: MemoryPublisher.publish(self, messages))
        return places


def make_bus_error(text: str) -> Exception:
    """Return what a bus raises whose broker does not answer."""
    return BusUnavailable(text)
