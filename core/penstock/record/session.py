"""A worker's session: one entry in Redis keeps all claims of a worker alive.

    1  a session is opened before anything is claimed, renewed every third of a lease, and ends when its worker leaves
    2  a session that is not renewed for a lease ends as a whole: its requests are free, and another worker adopts the
       partitions that it read (`penstock.worker.rescue`). Any worker ends it, after its own renewal. A session is not
       renewed while its worker's loop stands still
    3  a worker that renews too late learns that its session has ended. It drops all its claims, and opens another one

A crash after 1 costs a lease, and a third of one until another worker ends the session. A crash inside 2 costs nothing,
because 2 is one script. The thread that renews never waits for long: each of its calls ends within the time limit of
the server's client.
"""

import contextlib
import logging
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

import redis

from penstock.messages import now_s
from penstock.names import STAGES, Stage
from penstock.record.claim import Claim, ClaimEvent
from penstock.record.record import Record, Renewed
from penstock.redis.client import is_outage
from penstock.redis.scripts import ScriptCall

log = logging.getLogger(__name__)

MAX_CLOCK_ERROR_S = 5.0
"""A worker whose clock differs from the server's by more says so in its log."""
STOP_TIMEOUT_S = 2.0
"""Seconds that a leaving worker waits for a server that does not answer."""
UNLIMITED_GRACE_S = 1e6


def renew_on_own_thread(session: "Session") -> None:
    """Renew a session on a thread of its own, until it is stopped."""
    threading.Thread(target=session.renew_until_stopped, name="penstock-session", daemon=True).start()


class Session:
    """Belongs to one worker object and one server. A thread renews it, on a connection of its own.

    In each turn the worker's loop collects what the thread learned: claims that were lost or cancelled, and how many
    requests are free. While Redis cannot be reached no claim is known to be lost; the epoch guards the log.
    """

    def __init__(
        self,
        record: Record,
        name: str,
        list_partitions: Callable[[], list[str]] = list,
        *,
        renew_membership: Callable[[float], Sequence[ScriptCall]] = lambda _: (),
        is_stalled: Callable[[], bool] = lambda: False,
        keep: Callable[["Session"], None] | None = None,
    ) -> None:
        """Open the session, and give it to `keep`, which calls `renew` on some thread, when `due_s` has come, until
        `is_stopped`; without it the session has a thread of its own.

        `list_partitions` returns the partitions that this worker alone reads. `renew_membership` returns the calls by
        which its place in its group is kept, see `penstock.bus.contract.Member.build_renewal`. `is_stalled` returns
        whether the worker's loop stands still. Raise `redis.RedisError`.
        """
        self.id = ""
        """The worker's name and a token. The session lives, as far as is known."""
        self.num_free: dict[Stage, int] = dict.fromkeys(STAGES, 0)
        """The number of requests of each stage that any worker may take over. The loop lowers it when it takes some."""
        self._server_offset_s = 0.0
        self.clock_ahead_s = 0.0
        """Seconds by which this process's clock is ahead of the server's (negative: behind), at the last renewal."""
        self.interval_s = record.lease_s / 3
        """The time between two renewals."""
        self._record, self._name, self._list_partitions = record, name, list_partitions
        self._renew_membership, self._is_stalled = renew_membership, is_stalled
        self._claims: dict[Claim, None] = {}  # in their order: runs of the simulated world are repeated
        self._lost: list[Claim] = []
        self._cancelled: set[str] = set()
        self._named: dict[str, float] = {}
        """The partitions that this session reads, with the time at which it last did."""
        self._renewed_s = 0.0
        self._last = Renewed(0, 0, [])
        self._grace_s = self._grace_until_s = 0.0
        self._failure: BaseException | None = None
        self._lock = threading.Lock()
        self._renewing = threading.Lock()
        """Held during a renewal and `disown_partitions`: a renewal under way would name the given up partitions
        again."""
        self._stop = threading.Event()
        self._open_session()
        self.due_s = time.monotonic() + self.interval_s
        """The time of the next renewal, by the monotonic clock."""
        (keep or renew_on_own_thread)(self)

    @property
    def is_stopped(self) -> bool:
        """Whether the session is not to be renewed any more."""
        return self._stop.is_set()

    def add_claim(self, claim: Claim) -> None:
        """Watch a claim: `collect_events` returns what happens to it."""
        with self._lock:
            self._claims[claim] = None

    def remove_claim(self, claim: Claim) -> None:
        """Forget a claim that ended, was handed off, released or lost."""
        with self._lock:
            self._claims.pop(claim, None)

    @property
    def claims(self) -> set[Claim]:
        """The claims that are watched now."""
        with self._lock:
            return set(self._claims)

    def collect_events(self) -> list[tuple[Claim, ClaimEvent]]:
        """Return claims that are `LOST`, each once, and those that are `CANCELLED`, until they are removed.

        Raise the error that ended the renewals, if there was one; an outage does not end them.
        """
        if self._failure is not None:
            raise self._failure
        with self._lock:
            lost, self._lost = self._lost, []
            cancelled = [claim for claim in self._claims if claim.id in self._cancelled] if self._cancelled else []
            self._cancelled = {claim.id for claim in cancelled}
        return [(claim, ClaimEvent.LOST) for claim in lost] + [(claim, ClaimEvent.CANCELLED) for claim in cancelled]

    def stop(self) -> None:
        """Stop renewing, so that the session expires. A renewal under way is waited for, up to `STOP_TIMEOUT_S`."""
        self._stop.set()
        if self._renewing.acquire(timeout=STOP_TIMEOUT_S):
            self._renewing.release()

    def disown_partitions(self) -> None:
        """Give up all partitions, as this worker leaves its group. Raise `redis.RedisError`."""
        with self._renewing:
            named, self._list_partitions, self._named = list(self._named), list, {}
            self._record.disown_partitions(self.id, named)

    def close(self) -> None:
        """End the session: the requests that it still holds are free at once."""
        self.stop()
        with contextlib.suppress(redis.RedisError):  # else it runs out
            self.disown_partitions()
            self._record.end_expired_sessions(0, self.id)

    def renew(self, beside: ScriptCall | None = None) -> None:
        """Renew the session. `beside` is called in the same round trip; its reply stays None if it was not called.

        Raises nothing: after an outage the next call tries again, any other error is raised by `collect_events`. Does
        nothing while the worker's loop stands still: the next renewal after that learns that the session is over.
        """
        begun_s = time.monotonic()
        try:
            with self._renewing:
                if not self.is_stopped and not self._is_stalled():
                    self._renew_session(beside)
        except BaseException as error:
            if not (isinstance(error, redis.RedisError) and is_outage(error)):
                self._failure = error
                self._stop.set()
        self.due_s = begun_s + self.interval_s

    def renew_until_stopped(self) -> None:
        """Renew the session whenever that is due, on the calling thread."""
        while not self._stop.wait(max(0.0, self.due_s - time.monotonic())):
            self.renew()

    def _open_session(self) -> None:
        session = f"{self._name}/{secrets.token_hex(4)}"
        renewed = self._renew_at_server(session)
        assert renewed is not None, "a new session has nothing to be compared with"
        with self._lock:
            self._lost += self._claims
            self._claims, self.id = {}, session
        self._last, self._renewed_s = renewed, time.monotonic()
        self._grace_s, self._grace_until_s = UNLIMITED_GRACE_S, self._renewed_s + self._record.lease_s

    def _renew_session(self, beside: ScriptCall | None) -> None:
        partitions, dropped = self._list_read_partitions()
        calls = [*([] if beside is None else [beside]), *self._renew_membership(self._record.lease_s)]
        renewed = self._renew_at_server(self.id, self._last.until_ms, partitions, dropped, calls)
        if renewed is None:
            before = self.id
            self._open_session()
            # A server that lost the last renewal would keep the old session for longer.
            self._record.end_expired_sessions(0, before)
            return
        self._note_renewal(renewed)
        as_of_s = renewed.now_ms / 1000 - (self._grace_s if time.monotonic() < self._grace_until_s else 0.0)
        self.num_free = self._record.end_expired_sessions(round(as_of_s * 1000))

    def _renew_at_server(
        self,
        session: str,
        until_ms: int = 0,
        partitions: Sequence[str] = (),
        dropped: Sequence[str] = (),
        beside: Sequence[ScriptCall] = (),
    ) -> Renewed | None:
        """Renew a session as `Record.renew_session` does, and compare the clocks."""
        before_s, begun_s = now_s(), time.monotonic()
        with self._record.pace.ask(0.0):
            renewed = self._record.renew_session(session, until_ms, partitions, dropped, beside)
        if renewed is not None:
            was_right = abs(self.clock_ahead_s) <= MAX_CLOCK_ERROR_S
            # Monotonic, as the host's clock may be set between two renewals.
            self._server_offset_s = renewed.now_ms / 1000 - (begun_s + time.monotonic()) / 2
            self.clock_ahead_s = (before_s + now_s()) / 2 - renewed.now_ms / 1000
            if was_right and abs(self.clock_ahead_s) > MAX_CLOCK_ERROR_S:
                log.warning(
                    "this host's clock is %.1f s %s the clock of Redis. Deadlines use the clock of Redis, but times in"
                    " results and traces are wrong: synchronise this host's clock with NTP",
                    abs(self.clock_ahead_s), "ahead of" if self.clock_ahead_s > 0 else "behind",
                )  # fmt: skip
        return renewed

    def server_now_s(self) -> float:
        """Return the time by the server's clock, in seconds since the epoch."""
        return time.monotonic() + self._server_offset_s

    def _note_renewal(self, renewed: Renewed) -> None:
        """Note a renewal's reply. A late one shows that this worker was held up, or that the clock was put forward.

        Other workers may have been held up as well: for a lease their sessions get that much more time to renew.
        """
        monotonic_s, lease_s = time.monotonic(), self._record.lease_s
        gap_s = max(monotonic_s - self._renewed_s, (renewed.now_ms - self._last.now_ms) / 1000)
        if gap_s > self._record.settings.lease_s / 2:  # others may not have seen that the server is slow
            self._grace_s, self._grace_until_s = gap_s, monotonic_s + lease_s
        self._renewed_s, self._last = monotonic_s, renewed
        if renewed.cancelled:
            with self._lock:
                self._cancelled |= set(renewed.cancelled)

    def _list_read_partitions(self) -> tuple[list[str], list[str]]:
        """Return the partitions that this worker reads now, and those that it has not read for a lease.

        Where the group assigns a partition to another member, a lease is long enough for that member to name it.
        """
        partitions, monotonic_s = self._list_partitions(), time.monotonic()
        dropped = [
            part
            for part, seen_s in self._named.items()
            if part not in partitions and monotonic_s - seen_s > self._record.lease_s
        ]
        for part in dropped:
            self._named.pop(part, None)
        self._named |= dict.fromkeys(partitions, monotonic_s)
        return partitions, dropped

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
