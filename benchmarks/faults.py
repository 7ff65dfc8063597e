"""`python -m benchmarks.faults [--quick | --smoke] [--json FILE]`: damage in every tier while a pipeline serves.

Blocks are flipped, cut off and swapped at random in shared memory, on disk and in Redis, and the KV server is restarted
empty now and then, while a prefill and a decode worker answer the same prompts again and again from a small pool. Every
answer is compared with the undivided model's. Quick stops after 1,000 reads of blocks, the full run after 10,000.
"""

import tempfile
from pathlib import Path

from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn

from benchmarks.common import parse_arguments, report_figures
from penstock.config.addresses import Addresses
from penstock.local.valkey import ValkeyServer
from sim.kv_faults import BlockCorrupter, count_reads, serve_damaged, tight_settings
from sim.line import InProcessPipeline, serving_engine
from sim.workload import ENGINE_SETTINGS

SMALL_POOL_SETTINGS = ENGINE_SETTINGS.model_copy(update={"pool_mb": 8})
ANSWERS_PER_RESTART = 5


def main() -> None:
    given = parse_arguments("damage in every tier of the KV store while it serves")
    reads, num_prompts = given.choose_size((10_000, 24), (1_000, 24), (20, 6))
    with tempfile.TemporaryDirectory(prefix="penstock-faults-") as name:
        directory = Path(name)
        with ValkeyServer(directory / "stream") as stream, ValkeyServer(directory / "kv", appendonly=False) as kv:
            report_figures(run(directory, stream, kv, reads, num_prompts), given)


def run(directory: Path, stream: ValkeyServer, kv: ValkeyServer, reads: int, num_prompts: int) -> dict[str, float]:
    addresses = Addresses(pipeline="faults", stream_url=stream.url, kv_url=kv.url)
    columns = (*Progress.get_default_columns(), MofNCompleteColumn(), TimeElapsedColumn())
    with (
        InProcessPipeline(addresses, kv=tight_settings(directory), engine=SMALL_POOL_SETTINGS) as line,
        BlockCorrupter(serving_engine(line.decode).store, kv.url, seed=20261121) as corrupter,
        Progress(*columns) as progress,
    ):
        task = progress.add_task("reads", total=reads)

        def restart(number: int) -> None:
            progress.update(task, completed=min(reads, count_reads(line)))
            if number % ANSWERS_PER_RESTART == ANSWERS_PER_RESTART - 1:
                kv.kill()
                kv.start()

        answers, wrong = serve_damaged(line, lambda: count_reads(line) >= reads, restart, num_prompts)
        counters = [
            tier.counters
            for store in (serving_engine(line.prefill).store, serving_engine(line.decode).store)
            for tier in store.tiers
        ]
        figures = {
            "faults_reads": count_reads(line),
            "faults_answers": answers,
            "faults_wrong": wrong,
            "faults_damaged_blocks_met": sum(one.damaged for one in counters),
            "faults_leases_left": sum(tier.read_usage().leased for tier in serving_engine(line.decode).store.tiers),
        }
        for strike, count in sorted(corrupter.num_corruptions.items()):
            figures[f"faults_{strike.replace(' ', '_')}"] = count
        return {name: float(value) for name, value in figures.items()}


if __name__ == "__main__":
    main()
