"""A thread that keeps the leases of everything a worker holds."""

import threading
from collections.abc import Callable
from types import TracebackType
from typing import Self

import redis

from penstock.record.claim import Claim
from penstock.record.record import Record


class LeaseKeeper:
    """Renews all registered claims every third of a lease, on a thread and a connection of its own.

    A claim found fenced goes into `lost` and is told to `on_lost` (on the keeper's thread), once. While Redis
    cannot be reached nothing is known to be lost; the epoch guards the log.
    """

    def __init__(self, record: Record, on_lost: Callable[[Claim], None] | None = None) -> None:
        self.lost: set[Claim] = set()
        """Claims found fenced and not dropped since."""
        self._record = record
        self._on_lost = on_lost
        self._claims: set[Claim] = set()
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
            self.lost.discard(claim)

    def close(self) -> None:
        """Stop renewing: the leases that are left run out."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(self._record.lease_s / 3):
            with self._lock:
                claims = list(self._claims)
            try:
                fenced = self._record.renew(claims)
            except (redis.ConnectionError, redis.TimeoutError):
                continue  # the next round tries again
            for claim in fenced:
                self._lose(claim)

    def _lose(self, claim: Claim) -> None:
        with self._lock:
            if claim not in self._claims:
                return  # dropped meanwhile
            self._claims.discard(claim)
            self.lost.add(claim)
        if self._on_lost is not None:
            self._on_lost(claim)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
