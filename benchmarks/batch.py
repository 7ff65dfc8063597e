"""A large batch from the command line, killed and gone on with: each line must be there, once.

python -m benchmarks.batch [--quick | --smoke] [--json FILE]

10,000 rows (`--quick`: 1,000) with short answers go through `penstock batch run`, against a stack of their own with the
demo model. Three times, after a quarter, a half and three quarters of the rows, the command is killed with SIGKILL and
started again. Then every row of the input is looked for in the output and in the error file, and every request in the
results topic, where a request that was asked again after its end would be twice.
"""

import json
import os
import sys
import tempfile
import time
from collections import Counter
from functools import partial
from pathlib import Path

from benchmarks.common import Arguments, describe_machine, parse_arguments, report_figures
from penstock.bus.connect import connect_bus
from penstock.config.settings import BusSettings
from penstock.local.processes import Child, start_child
from penstock.local.stack import Stack
from penstock.messages import Result, decode_message
from penstock.names import Pipeline
from penstock.waiting import wait_until

ENVIRONMENT = {"PENSTOCK_ENGINE_DTYPE": "float32", "PENSTOCK_ENGINE_DEVICE": "cpu"}
PROMPTS = ("In the beginning", "And the king said", "The words of the wise", "And it came to pass")
MAX_TOKENS = 4
NUM_KILLS = 3
BATCH_TIMEOUT_S = 3600.0


def write_rows(path: Path, count: int) -> None:
    with path.open("w") as file:
        for number in range(count):
            body = {"model": "demo", "prompt": PROMPTS[number % 4], "max_tokens": MAX_TOKENS, "seed": number}
            row = {"custom_id": f"row-{number}", "method": "POST", "url": "/v1/completions", "body": body}
            file.write(json.dumps(row) + "\n")


def start_batch(stack: Stack, folder: Path) -> Child:
    where = {"PENSTOCK_PIPELINE": stack.addresses.pipeline, "PENSTOCK_STREAM_URL": stack.addresses.stream_url}
    command = [sys.executable, "-m", "penstock.cli.main", "batch", "run", "in.jsonl", "-o", "out.jsonl"]
    environment = {**os.environ, **where}
    return start_child(command, name="batch run", log=folder / "log", environment=environment, directory=folder)


def count_finished(folder: Path) -> int:
    """Return how many rows the journal has."""
    path = folder / "out.jsonl.journal"
    whole = (
        [line for line in path.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")] if path.exists() else []
    )
    entries = [json.loads(line) for line in whole]
    return sum(len(entry.get("ok", ())) + len(entry.get("failed", ())) for entry in entries)


def _has_rows_or_ended(child: Child, folder: Path, count: int) -> bool:
    return count_finished(folder) >= count or not child.is_alive()


def run_with_kills(stack: Stack, folder: Path, count: int) -> int:
    """Run the batch to its end; return how often it was killed while it ran."""
    kills = 0
    for kill in range(1, NUM_KILLS + 1):
        child, goal = start_batch(stack, folder), count * kill // (NUM_KILLS + 1)
        is_enough = partial(_has_rows_or_ended, child, folder, goal)
        wait_until(is_enough, BATCH_TIMEOUT_S, f"{goal} rows", every_s=0.2)
        kills += child.is_alive()
        child.kill()
        print(f"killed with {count_finished(folder):,} of {count:,} rows in the journal")
    last = start_batch(stack, folder)
    if last.wait(BATCH_TIMEOUT_S) not in (0, 1):
        raise RuntimeError(last.read_log_tail())
    return kills


def read_row_ids(path: Path) -> list[str]:
    return [json.loads(line)["custom_id"] for line in path.read_bytes().splitlines()] if path.exists() else []


def count_repeated(stack: Stack, folder: Path) -> int:
    """Return how many requests have more than one result."""
    run = json.loads((folder / "out.jsonl.journal").read_bytes().splitlines()[0])["run"]
    bus = connect_bus(stack.addresses, BusSettings())
    results = bus.read_all(Pipeline(stack.addresses.pipeline).results_topic)
    ids = Counter(decode_message(Result, message.value).id for message in results)
    return sum(times - 1 for name, times in ids.items() if name.startswith(f"cmpl-{run}-"))


def run(given: Arguments) -> dict[str, float]:
    """Run and count; return the figures."""
    count = given.choose_size(10_000, 1000, 40)
    with tempfile.TemporaryDirectory(prefix="penstock-batch-") as name:
        folder = Path(name)
        write_rows(folder / "in.jsonl", count)
        how = given.choose_stack()
        with how(folder / "stack", pipeline="batch", environment=ENVIRONMENT) as stack:
            stack.wait_until_ready(600)
            begun_s = time.monotonic()
            kills = run_with_kills(stack, folder, count)
            took_s = time.monotonic() - begun_s
            repeated = count_repeated(stack, folder)
        failed = read_row_ids(folder / "out.errors.jsonl")
        found = Counter([*read_row_ids(folder / "out.jsonl"), *failed])
    print(f"\n{describe_machine()}; {count:,} rows of {MAX_TOKENS} tokens in {took_s:.0f} s, {kills} kills among them")
    return {
        "batch_lines": count,
        "batch_results": len(found),
        "batch_duplicates": sum(times - 1 for times in found.values()),
        "batch_missing": sum(f"row-{number}" not in found for number in range(count)),
        "batch_failed": len(failed),
        "batch_repeated_requests": repeated,
        "batch_kills": kills,
        "batch_rows_per_s": count / took_s,
    }


def main() -> None:
    given = parse_arguments(__doc__ or "")
    report_figures(run(given), given)


if __name__ == "__main__":
    main()
