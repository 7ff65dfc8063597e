"""The rules that are compared, each with its published defaults. `RULES` makes one for each placer."""

from collections.abc import Callable, Mapping

from penstock.bus.affinity import AffinityPartitioner
from penstock.plan.placing import PlacedRequest, RoundRobin, Rule, View


class Hash:
    """What Penstock does: the hash of the session, or of the prompt's beginning, and more workers for a hot one."""

    memory_s = 0.0

    def __init__(self) -> None:
        self._partitioner = AffinityPartitioner()

    def choose(self, request: PlacedRequest, view: View) -> int:
        """Return the number of the worker that reads the partition."""
        return self._partitioner.choose_partition(request.affinity, view.num_workers, view.now_s)


RULES: Mapping[str, Callable[[], Rule]] = {"round_robin": RoundRobin, "hash": Hash}
