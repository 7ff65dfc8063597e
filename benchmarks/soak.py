"""Ten minutes at full budgets: memory stays flat, and nothing is left behind.

python -m benchmarks.soak [--quick | --smoke] [--json FILE]

One prefill and one decode worker as processes on the demo model, with shared memory, disk and a Valkey of its own for
blocks, each with a budget that is full after seconds, so that all of them evict all the time. Six requests of four
tenants are under way at any time, a third of them with a prompt that was asked before. Every second the resident memory
of each worker and the usage of each tier are noted.

When all is answered, the workers have ended and a checker goes through every tier: its own books, leases, slots that
somebody was writing to, files that are no blocks. `soak_rss_growth_mb` is the mean of the last quarter less that of the
second one, of the worker that grew most; the first quarter is left out as a warm-up.
"""

import contextlib
import random
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import SHM, Arguments, run_benchmark
from benchmarks.processor import read_resident_bytes
from benchmarks.systems import answer_requests, open_stack
from penstock.client.sync import Client
from penstock.config.settings import KVSettings
from penstock.kvstore.arena.layout import WRITING
from penstock.kvstore.tiers.host import HostTier
from penstock.kvstore.tiers.redis import RedisTier
from penstock.kvstore.tools import TierLocation, open_tiers
from penstock.local.stack import Stack
from penstock.local.valkey import ValkeyServer

BUDGET_MB = 24
SAMPLE_EVERY_S = 1.0
NUM_UNDER_WAY = 6
NUM_KNOWN = 20
KNOWN_SHARE = 0.35
NUM_TENANTS = 4
PROMPT_TOKENS = (100, 300)


def find_leaks(places: list[TierLocation], disk: Path) -> list[str]:
    """Return what is left behind, as text, when no process works."""
    found = []
    for place in places:
        tier = place.tier
        if isinstance(tier, HostTier | RedisTier):
            found += [f"{place.name}: {line}" for line in tier.check_integrity()]
        if isinstance(tier, HostTier):
            writing = int((tier.arena.tables.state_array == WRITING).sum())
            found += [f"{place.name}: {writing} slots are being written"] if writing else []
        usage = place.read_usage()
        found += [f"{place.name}: {usage.leased} blocks are leased"] if usage.leased else []
        found += [f"{place.name}: {usage.bytes} bytes, {usage.budget} allowed"] if usage.bytes > usage.budget else []
    files = (file for file in disk.rglob("*") if file.is_file())
    return found + [f"disk: {file} is not ours" for file in files if file.suffix != ".slots" and file != disk / "lock"]


@contextlib.contextmanager
def start_system(how: type[Stack]) -> Iterator[tuple[Stack, list[TierLocation], Path]]:
    """Start the stack and its KV server; yield them with the tiers as seen from outside."""
    with contextlib.ExitStack() as exits:
        memory = exits.enter_context(tempfile.TemporaryDirectory(prefix="penstock-soak-", dir=SHM))
        directory = Path(exits.enter_context(tempfile.TemporaryDirectory(prefix="penstock-soak-")))
        server = exits.enter_context(ValkeyServer(directory / "kv", appendonly=False))
        disk = directory / "blocks"
        environment = {
            "PENSTOCK_ENGINE_DEVICE": "cpu", "PENSTOCK_ENGINE_POOL_MB": "48", "PENSTOCK_RECORD_KEEP_S": "30",
            "PENSTOCK_KV_URL": server.url, "PENSTOCK_KV_STORE_SHARED_MB": str(BUDGET_MB),
            "PENSTOCK_KV_STORE_SHARED_DIR": memory, "PENSTOCK_KV_STORE_DISK_MB": str(BUDGET_MB),
            "PENSTOCK_KV_STORE_DISK_DIR": str(disk), "PENSTOCK_KV_STORE_REDIS_MB": str(BUDGET_MB),
        }  # fmt: skip
        stack = exits.enter_context(open_stack(how, environment, pipeline="soak"))
        settings = KVSettings(shared_dir=memory, disk_mb=BUDGET_MB, disk_dir=str(disk), redis_mb=BUDGET_MB)
        places = open_tiers(settings, [server.url], exits, None, print)
        if len(places) != 3:
            raise RuntimeError(f"three tiers should be there: {[place.name for place in places]}")
        yield stack, places, disk


class Samples:
    """The memory of each worker and the usage of the fullest tier, each second."""

    def __init__(self, stack: Stack, places: list[TierLocation]) -> None:
        self._places = places
        self._pids = {worker.name: worker.child.pid for worker in stack.workers if worker.child is not None}
        self._next_s = 0.0
        self.memory_mb: dict[str, list[float]] = {name: [] for name in self._pids}
        self.used_shares: list[float] = []
        """The used share of the fullest tier's budget."""

    def take(self) -> None:
        """Take a sample, if it is time for one."""
        if time.monotonic() < self._next_s:
            return
        self._next_s = time.monotonic() + SAMPLE_EVERY_S
        for name, pid in self._pids.items():
            self.memory_mb[name].append(read_resident_bytes([pid]) / 2**20)
        usages = [place.tier.read_usage() for place in self._places]
        self.used_shares.append(max(usage.bytes / max(1, usage.budget) for usage in usages))


def generate_requests(minutes: float) -> Iterator[dict[str, Any]]:
    """Yield requests for some minutes."""
    chance, end_s = random.Random(11), time.monotonic() + 60 * minutes

    def make_prompt() -> list[int]:
        return [chance.randrange(3, 1000) for _ in range(chance.randint(*PROMPT_TOKENS))]

    known = [make_prompt() for _ in range(NUM_KNOWN)]
    while time.monotonic() < end_s:
        is_known, tenant = chance.random() < KNOWN_SHARE, f"tenant-{chance.randrange(NUM_TENANTS)}"
        prompt = chance.choice(known) if is_known else make_prompt()
        yield {"token_ids": prompt, "tenant": tenant, "max_tokens": 16, "temperature": 0.8, "seed": 1}


def compute_growth(values: Sequence[float]) -> float:
    """Return the mean of the last quarter less that of the second one; the first is left out as a warm-up."""
    quarter = len(values) // 4
    if not quarter:
        return 0.0
    return statistics.mean(values[3 * quarter :]) - statistics.mean(values[quarter : 2 * quarter])


def run(given: Arguments) -> dict[str, float]:
    """Run and check; return the figures."""
    minutes = given.choose_size(10.0, 0.4, 0.03)
    with start_system(given.choose_stack()) as (stack, places, disk):
        samples, num_answered = Samples(stack, places), 0
        with Client(stack.addresses) as client:
            for _ in answer_requests(client, generate_requests(minutes), NUM_UNDER_WAY):
                num_answered += 1
                samples.take()
        stack.stop_workers()
        left = find_leaks(places, disk)
    print(*left, f"{num_answered} requests", sep="\n")
    return {
        "soak_minutes": minutes,
        "soak_requests": num_answered,
        "soak_rss_growth_mb": max(map(compute_growth, samples.memory_mb.values())),
        "soak_most_of_budget": max(samples.used_shares),
        "soak_leaked": len(left),
    }


if __name__ == "__main__":
    run_benchmark(__doc__, run)
