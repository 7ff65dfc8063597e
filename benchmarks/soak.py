"""Ten minutes at full budgets: memory stays flat, answers stay right, and nothing is left behind.

python -m benchmarks.soak [--quick | --smoke] [--json FILE]

One prefill and one decode worker as processes on the demo model in float32, with shared memory, disk and a Valkey of
its own for blocks, each with a budget that is full after seconds, so that all of them evict all the time. A few
requests are under way at any time. Most are new; the others come again and again, from several tenants, greedy and
sampled, some as the next turn of an earlier answer, and what they are answered is compared with the undivided model.
Every second the resident memory of each process and the usage of each tier are noted.

When all is answered, the workers have ended and a checker goes through every tier: its own books, leases, slots that
somebody was writing to, files that are no blocks. `soak_rss_growth_mb` is the mean of the last quarter less that of the
second one, of the worker that grew most; the first quarter is left out as a warm-up.
"""

import contextlib
import itertools
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from rich.progress import Progress

from benchmarks.common import SHM, Arguments, describe_machine, parse_arguments, report_figures, save_plot
from benchmarks.soak_load import SoakLoad
from benchmarks.watch import Sample, Watch, read_resident_mb
from penstock.client.sync import Client
from penstock.config.settings import KVSettings
from penstock.kvstore.arena.layout import WRITING
from penstock.kvstore.tiers.host import HostTier
from penstock.kvstore.tiers.redis import RedisTier
from penstock.kvstore.tools import TierLocation, open_tiers
from penstock.local.stack import Stack
from penstock.local.valkey import ValkeyServer

BUDGET_MB = 24
VALKEY_NAME = "Valkey, blocks"


def make_sampler(stack: Stack, server: ValkeyServer, places: list[TierLocation]) -> Callable[[], Sample]:
    """Return a function that samples the processes' memory, and the used share of each tier's budget."""
    pids = {worker.name: worker.child.pid for worker in stack.workers if worker.child is not None}
    pids[VALKEY_NAME] = server.pid or 0

    def sample() -> Sample:
        usages = {place.name: place.tier.read_usage() for place in places}
        shares = {name: usage.bytes / max(1, usage.budget) for name, usage in usages.items()}
        return {"memory": read_resident_mb(pids), "usage": shares}

    return sample


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
def start_system(how: type[Stack]) -> Iterator[tuple[Stack, ValkeyServer, list[TierLocation], Path]]:
    """Start the stack and its KV server; yield them with the tiers as seen from outside."""
    with contextlib.ExitStack() as exits:
        memory = exits.enter_context(tempfile.TemporaryDirectory(prefix="penstock-soak-", dir=SHM))
        directory = Path(exits.enter_context(tempfile.TemporaryDirectory(prefix="penstock-soak-")))
        server = exits.enter_context(ValkeyServer(directory / "kv", appendonly=False))
        disk = directory / "blocks"
        environment = {
            "PENSTOCK_ENGINE_DTYPE": "float32",
            "PENSTOCK_ENGINE_DEVICE": "cpu",
            "PENSTOCK_ENGINE_POOL_MB": "48",
            "PENSTOCK_RECORD_KEEP_S": "30",
            "PENSTOCK_KV_URL": server.url,
            "PENSTOCK_KV_STORE_SHARED_MB": str(BUDGET_MB),
            "PENSTOCK_KV_STORE_SHARED_DIR": memory,
            "PENSTOCK_KV_STORE_DISK_MB": str(BUDGET_MB),
            "PENSTOCK_KV_STORE_DISK_DIR": str(disk),
            "PENSTOCK_KV_STORE_REDIS_MB": str(BUDGET_MB),
        }
        stack = exits.enter_context(how(directory / "stack", pipeline="soak", environment=environment))
        stack.wait_until_ready(300)
        settings = KVSettings(shared_dir=memory, disk_mb=BUDGET_MB, disk_dir=str(disk), redis_mb=BUDGET_MB)
        places = open_tiers(settings, [server.url], exits, None, print)
        if len(places) != 3:
            raise RuntimeError(f"three tiers should be there: {[place.name for place in places]}")
        yield stack, server, places, disk


def run_load(stack: Stack, load: SoakLoad, minutes: float) -> None:
    """Keep requests open for some minutes, then wait for the last."""
    until = time.monotonic() + 60 * minutes
    with Client(stack.addresses) as client, Progress(transient=True) as progress:
        task = progress.add_task("soak", total=60 * minutes)
        while (left_s := until - time.monotonic()) > 0:
            load.send_and_read(client)
            progress.update(task, completed=60 * minutes - left_s, description=f"soak, {load.num_answered} answered")
        load.read_rest(client)


def run(given: Arguments) -> dict[str, float]:
    """Run, check and draw; return the figures."""
    minutes = given.choose_size(10.0, 0.4, 0.03)
    load = SoakLoad(given.choose_size(20, 20, 2))
    with start_system(given.choose_stack()) as (stack, server, places, disk):
        with Watch(make_sampler(stack, server, places)) as watch:
            run_load(stack, load, minutes)
        names = {worker.name for worker in stack.workers}
        stack.stop_workers()
        left = find_leaks(places, disk)
    for line in [*load.mistakes, *left]:
        print(line)
    print(
        f"\n{describe_machine()}; {load.num_answered} requests, {load.num_compared} compared; "
        f"{', '.join(sorted(names))}"
    )
    for name, shares in watch.series["usage"].items():
        print(f"{name:16} at most {max(shares):.0%} of its budget, {statistics.median(shares):.0%} in the median")
    if given.is_full:
        save_plot(watch.draw_plot({"memory": "resident memory, MB", "usage": "used, of the budget"}), "soak")
    return {
        "soak_minutes": minutes,
        "soak_requests": load.num_answered,
        "soak_compared": load.num_compared,
        "soak_wrong": len(load.mistakes),
        "soak_stuck": load.num_stuck,
        "soak_rss_growth_mb": max(
            grown for name, grown in watch.compute_growth("memory").items() if name != VALKEY_NAME
        ),
        "soak_most_of_budget": max(itertools.chain.from_iterable(watch.series["usage"].values())),
        "soak_leaked": len(left),
    }


def main() -> None:
    given = parse_arguments(__doc__ or "")
    report_figures(run(given), given)


if __name__ == "__main__":
    main()
