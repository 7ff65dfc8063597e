"""The in-process tier: a dictionary with a byte budget that forgets what was used longest ago."""

from collections import OrderedDict
from collections.abc import Sequence

from kvstore.tiers.contract import Counters


class MemoryTier:
    """Blocks in this process's memory, at most `budget_bytes` of them."""

    name = "memory"

    def __init__(self, budget_bytes: int) -> None:
        self.counters = Counters()
        self._budget_bytes = budget_bytes
        self._used_bytes = 0
        self._blocks: OrderedDict[bytes, bytes] = OrderedDict()

    def get(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """See `Tier.get`."""
        self.touch(keys)
        return [self._blocks.get(key) for key in keys]

    def put(self, blocks: Sequence[tuple[bytes, bytes]]) -> None:
        """See `Tier.put`. A block larger than the whole budget is not kept."""
        for key, stored in blocks:
            self._used_bytes -= len(self._blocks.pop(key, b""))
            if len(stored) <= self._budget_bytes:
                self._blocks[key] = stored
                self._used_bytes += len(stored)
                self.counters.bytes_written += len(stored)
            while self._used_bytes > self._budget_bytes:
                self._used_bytes -= len(self._blocks.popitem(last=False)[1])

    def touch(self, keys: Sequence[bytes]) -> list[bool]:
        """See `Tier.touch`."""
        here = [key in self._blocks for key in keys]
        for key in (key for key, found in zip(keys, here, strict=True) if found):
            self._blocks.move_to_end(key)
        return here
