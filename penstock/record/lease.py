"""A thread that keeps the leases of everything a worker holds, and looks for requests whose workers died."""

import threading
from collections.abc import Callable
from types import TracebackType
from typing import Self

from penstock.names import Stage
from penstock.reach import is_away
from penstock.record.claim import Claim, Renewal
from penstock.record.record import Record

LEAVE_S = 0.5
"""A worker that leaves waits no longer for a round under way: Redis may hang."""


class LeaseKeeper:
    """Renews all registered claims every third of a lease, on a thread and a connection of its own.

    What it finds out is for the worker's loop, which asks each turn: claims that another holds now, claims whose end
    somebody asked for, and requests to take over. While Redis cannot be reached nothing is known to be lost; the epoch
    guards the log.

    `tend` is called each time, for what else the others have to know is in hand; it may raise `redis.RedisError`.
    """

    def __init__(self, record: Record, stage: Stage, tend: Callable[[], None] = lambda: None) -> None:
        self.room = 0
        """How many requests the worker could take over. The loop sets it."""
        self._record, self._stage, self._tend = record, stage, tend
        self._claims: set[Claim] = set()
        self._told: dict[Claim, Renewal] = {}
        self._overdue: list[str] = []
        self._over: list[str] = []
        self._failure: Exception | None = None
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="penstock-leases", daemon=True)
        self._thread.start()

    def add(self, claim: Claim) -> None:
        """Keep this claim's lease from now on."""
        with self._lock:
            self._claims.add(claim)

    def drop(self, claim: Claim) -> None:
        """Forget a claim: it ended, was handed off, released or lost."""
        with self._lock:
            self._claims.discard(claim)
            self._told.pop(claim, None)

    def done(self, claim: Claim) -> None:
        """As `drop`, of one that ended or was handed off: nobody needs to look after it."""
        self.drop(claim)
        with self._lock:
            self._over.append(claim.id)

    def news(self) -> list[tuple[Claim, Renewal]]:
        """Claims found `FENCED`, each once, or `CANCELLED`, for as long as they are kept.

        Raises what made it impossible to keep leases, or to `tend`, if that was no outage.
        """
        if self._failure is not None:
            raise self._failure
        with self._lock:
            told, self._told = self._told, {}
        return list(told.items())

    def overdue(self) -> list[str]:
        """Requests found whose holders seem to be dead; each is told to one worker for a while."""
        with self._lock:
            found, self._overdue = self._overdue, []
        return found

    def close(self) -> None:
        """Stop renewing: the leases that are left run out. What Redis does not answer ends by itself, later."""
        self._stop.set()
        self._thread.join(LEAVE_S)

    def _run(self) -> None:
        while not self._stop.wait(self._record.lease_s / 3):
            try:
                self._renew()
                self._tend()
                self._look()
            except Exception as error:  # an outage: the next round tries again
                if not is_away(error):
                    self._failure = error
                    return

    def _renew(self) -> None:
        with self._lock:
            claims, over, self._over = list(self._claims), self._over, []
        self._record.let_go(self._stage, over)
        renewals = self._record.renew(claims)
        with self._lock:
            for claim, renewal in zip(claims, renewals, strict=True):
                if claim in self._claims and renewal in (Renewal.FENCED, Renewal.CANCELLED):
                    self._told[claim] = renewal
                    if renewal is Renewal.FENCED:
                        self._claims.discard(claim)

    def _look(self) -> None:
        room = self.room - len(self._overdue)
        if room > 0:
            found = self._record.overdue(self._stage, room)
            with self._lock:
                self._overdue += found

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
