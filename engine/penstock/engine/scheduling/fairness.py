"""The waiting sequences of one class, in an order that is fair between tenants. Plain Python.

Each tenant has a counter of the tokens it was served, divided by its weight; next in line is the oldest sequence of the
tenant with the least. This is the virtual token counter of "Fairness in Serving Large Language Models" (Sheng et al.,
OSDI 2024): a tenant that begins to wait starts at the least counter of those who wait, so that being away earns it no
credit.
"""

from collections import deque
from collections.abc import Collection, Iterator

from penstock.engine.sequence import Sequence

PROMPT_TOKEN_COST = 1
OUTPUT_TOKEN_COST = 2
"""The amount that a token adds to its tenant's counter. The ratio is the paper's: a decoded token keeps the machine
longer."""


class FairQueue:
    """The waiting sequences of one class; preempted ones come before all others."""

    def __init__(self) -> None:
        self._preempted: deque[Sequence] = deque()
        self._by_tenant: dict[str, deque[Sequence]] = {}
        """Has no tenant without a sequence."""
        self._served: dict[str, float] = {}
        self._last_tenant = ""
        """The tenant whose queue was the last to become empty."""
        self._min_counter = 0.0
        """Where the last tenant started; never decreases. A tenant without a counter of its own is at this value."""

    def __len__(self) -> int:
        return len(self._preempted) + sum(map(len, self._by_tenant.values()))

    def __iter__(self) -> Iterator[Sequence]:
        yield from self._preempted
        for seqs in self._by_tenant.values():
            yield from seqs

    def tokens_served(self, tenant: str) -> float:
        """Return the tenant's counter of weighted tokens."""
        return self._served.get(tenant, self._min_counter)

    def push(self, seq: Sequence) -> None:
        """Queue a sequence behind the others of its tenant."""
        if seq.tenant not in self._by_tenant:
            self._start_tenant(seq.tenant)
            self._by_tenant[seq.tenant] = deque()
        self._by_tenant[seq.tenant].append(seq)

    def push_front(self, seq: Sequence) -> None:
        """Queue a preempted sequence before all others."""
        self._preempted.appendleft(seq)

    def remove(self, seq: Sequence) -> None:
        """Remove a sequence that is queued here."""
        if seq in self._preempted:
            self._preempted.remove(seq)
            return
        self._by_tenant[seq.tenant].remove(seq)
        if not self._by_tenant[seq.tenant]:
            del self._by_tenant[seq.tenant]
            self._last_tenant = seq.tenant

    def peek(self, passed: Collection[Sequence] = ()) -> Sequence | None:
        """Return the next sequence that is not among `passed`, or None."""
        for seq in self._preempted:
            if seq not in passed:
                return seq
        tenants = self._by_tenant.items()
        for _, seqs in sorted(tenants, key=lambda item: (self.tokens_served(item[0]), item[1][0].arrival_number)):
            for seq in seqs:
                if seq not in passed:
                    return seq
        return None

    def charge_tenant(self, tenant: str, cost: int, weight: float = 1.0) -> None:
        """Add what a tenant was served to its counter: twice the weight, half the cost."""
        self._served[tenant] = self.tokens_served(tenant) + cost / weight

    def _start_tenant(self, tenant: str) -> None:
        waiting = self._by_tenant or (self._last_tenant,)
        self._min_counter = max(self._min_counter, min(map(self.tokens_served, waiting)))
        # An idle tenant below the minimum would start at the minimum: it is dropped, so that the table stays small.
        counters = self._served.items()
        self._served = {name: count for name, count in counters if count > self._min_counter or name in self._by_tenant}
        self._served[tenant] = max(self.tokens_served(tenant), self._min_counter)

    def check_integrity(self) -> None:
        """Assert that no sequence waits twice, or in another tenant's queue. For tests."""
        seqs = list(self)
        assert len(set(seqs)) == len(seqs), "a sequence waits twice"
        assert all(self._by_tenant.values()), "a tenant without a sequence"
        assert all(seq.tenant == tenant for tenant, queue in self._by_tenant.items() for seq in queue)
