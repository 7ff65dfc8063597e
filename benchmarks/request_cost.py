"""What a request costs beside a task of a task queue, and what a token costs: processor time of all processes together.

python -m benchmarks.request_cost [--quick | --smoke] [--json FILE]

The sides take turns in one run, each on a Valkey server of its own: Penstock with one worker that serves both stages
(one hop), with one prefill and one decode worker (two hops), and Celery, Dramatiq, arq and taskiq with one worker each.
All requests of a load are sent, then all answers are read; client, workers and server count. A prompt has 32 tokens, an
answer four. The model's forward pass is left out: it sleeps as long as that of a small one takes, and returns the same
logits. A task returns its pieces at once. All keep results, and acknowledge once the result is there; no other side has
a log, streams, or goes on with half an answer.

A token's cost is the difference between answers of 64 and of 4 tokens, 16 requests at a time with one hop, less that of
the same engine in this process.

`python -m benchmarks.peers.setup` installs the queues; those that are missing are left out.
"""

import os
import statistics
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

from benchmarks.common import Arguments, run_benchmark
from benchmarks.comparison import compute_ratio, measure_in_turns, print_table
from benchmarks.peers.queues import RUNS
from benchmarks.peers.servers import list_descendants
from benchmarks.peers.setup import environment_python, is_installed
from benchmarks.processor import Meter
from benchmarks.systems import (
    DEMO_ENVIRONMENT,
    GREEDY,
    IDLE_TOKEN_ID,
    IdleEngineStack,
    answer_requests,
    open_idle_engine,
    open_stack,
    run_sequences,
)
from penstock.client.sync import Client
from penstock.config.settings import EngineSettings
from penstock.engine.opening import open_engine
from penstock.engine.sequence import Sequence
from penstock.local.stack import REDIS_MB_VARIABLE
from penstock.local.valkey import ValkeyServer

PROMPT_TOKENS = 32
SHORT_TOKENS, LONG_TOKENS, ROWS = 4, 64, 16
"""Tokens of a request's answer; those of an answer whose tokens are counted, and how many of these are under way."""
SIDES = {"one_hop": {"prefill": 0, "decode": 0, "auto": 1}, "two_hops": {"prefill": 1, "decode": 1}}
"""By side of Penstock, its workers."""
BARE = "bare"
ENVIRONMENT = DEMO_ENVIRONMENT | {
    "PENSTOCK_ENGINE_THREADS": "1", "PENSTOCK_ENGINE_MAX_BATCH": "32", REDIS_MB_VARIABLE: "0",
}  # fmt: skip
"""Of Penstock's workers, which are all on this host."""
LOG_TAIL = 800
"""How many characters of a queue's log an error shows."""
Load = Callable[[int, int, int], object]
"""Answers so many requests with so many tokens each, in groups of so many."""


class Prompts:
    """Prompts of which no two begin alike: nothing is found that another request has stored."""

    def __init__(self) -> None:
        self._num_made = 0

    def make_prompt(self) -> list[int]:
        """Return the next prompt."""
        high, low = divmod(self._num_made, 900)
        self._num_made += 1
        return [3 + high, 3 + low, *range(100, 98 + PROMPT_TOKENS)]


class Side:
    """One system, warmed up, with what its processes cost."""

    def __init__(self, answer_load: Load, pids: list[int]) -> None:
        self._answer_load, self._meter = answer_load, Meter(pids)
        answer_load(32, SHORT_TOKENS, 32)

    def wait_idle(self) -> None:
        """Wait until the processes do next to nothing."""
        self._meter.wait_idle()

    def measure_ms(self, num_requests: int, num_tokens: int, max_open: int) -> float:
        """Return the milliseconds of processor time that a request costs, over a load of so many."""
        _, cost = self._meter.measure_load(lambda: float(bool(self._answer_load(num_requests, num_tokens, max_open))))
        return cost.own_s / num_requests * 1000


@contextmanager
def open_penstock(workers: Mapping[str, int]) -> Iterator[Side]:
    """Start Penstock with these workers."""
    prompts = Prompts()
    with (
        tempfile.TemporaryDirectory() as folder,
        ValkeyServer(Path(folder)) as server,
        open_stack(IdleEngineStack, ENVIRONMENT, redis=server.url, **workers) as stack,
        Client(stack.addresses) as client,
    ):

        def answer_load(num_requests: int, num_tokens: int, max_open: int) -> None:
            asked = [
                {"token_ids": prompts.make_prompt(), "max_tokens": num_tokens, "temperature": 0.0, "ignore_eos": True}
                for _ in range(num_requests)
            ]
            for begin in range(0, num_requests, max_open):  # so many share their steps from beginning to end
                for _, answer in answer_requests(client, asked[begin : begin + max_open], max_open):
                    assert answer.token_ids == [IDLE_TOKEN_ID] * num_tokens

        pids = [worker.child.pid for worker in stack.workers if worker.child is not None]
        assert server.pid is not None
        yield Side(answer_load, [os.getpid(), *pids, server.pid])


def open_bare_engine() -> Side:
    """Return the engine in this process."""
    settings = EngineSettings.model_validate({"dtype": "float32", "device": "cpu", "threads": 1, "max_batch": ROWS})
    engine, prompts = open_idle_engine(open_engine, settings), Prompts()

    def answer_load(num_requests: int, num_tokens: int, _: int) -> None:
        seqs = [
            Sequence(str(number), prompts.make_prompt(), sampling=GREEDY, seed=0, max_new_tokens=num_tokens)
            for number in range(num_requests)
        ]
        run_sequences(engine, seqs)
        for seq in seqs:
            engine.remove_sequence(seq)

    return Side(answer_load, [os.getpid()])


@contextmanager
def open_queue(name: str) -> Iterator[Side]:
    """Start a task queue on a server of its own."""
    with tempfile.TemporaryDirectory() as folder, ValkeyServer(Path(folder) / "valkey") as server:
        script = Path(__file__).parent / "peers" / "queues.py"
        with (Path(folder) / "sender.log").open("w+") as log, subprocess.Popen(
            [str(environment_python("queues")), str(script), name, server.url, folder],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True,
        ) as sender:  # fmt: skip
            assert sender.stdin is not None
            assert sender.stdout is not None
            said = sender.stdout

            def answer_load(num_tasks: int, *_: int) -> None:
                print(num_tasks, file=sender.stdin, flush=True)
                if said.readline() != "done\n":
                    raise RuntimeError(f"{name} failed: {(Path(folder) / 'sender.log').read_text()[-LOG_TAIL:]}")

            worker = int(said.readline())
            answer_load(1)  # its worker has its processes then
            assert server.pid is not None
            yield Side(answer_load, [sender.pid, *list_descendants(worker), server.pid])
            sender.stdin.close()


def run(given: Arguments) -> dict[str, float]:
    """Measure and print; return the figures."""
    rounds, num_requests = given.choose_size((10, 400), (3, 200), (1, 16))
    with ExitStack() as exits:
        sides = {BARE: open_bare_engine()}
        ours = given.choose_size(list(SIDES), list(SIDES), ["one_hop"])
        sides |= {name: exits.enter_context(open_penstock(SIDES[name])) for name in ours}
        if is_installed("queues"):
            sides |= {name: exits.enter_context(open_queue(name)) for name in RUNS}
        else:
            print("no queue of others: `python -m benchmarks.peers.setup` installs them")

        for side in () if given.size == "smoke" else sides.values():
            side.wait_idle()

        def measure_request(side: str, _: int) -> float:
            return sides[side].measure_ms(num_requests, SHORT_TOKENS, num_requests)

        def measure_token_us(side: str, _: int) -> float:
            short, long = (
                sides[side].measure_ms(num_requests // 2, tokens, ROWS) for tokens in (SHORT_TOKENS, LONG_TOKENS)
            )
            return (long - short) / (LONG_TOKENS - SHORT_TOKENS) * 1000

        asked = {name: partial(measure_request, name) for name in sides if name != BARE}
        costs = measure_in_turns(asked, rounds, "requests")
        tokens = measure_in_turns(
            {name: partial(measure_token_us, name) for name in (BARE, "one_hop")}, rounds, "tokens"
        )
    print_table(costs, "ms of processor time a request")
    print_table(tokens, "us of processor time a token")
    added_us = [ours - bare for ours, bare in zip(tokens["one_hop"], tokens[BARE], strict=True)]
    figures = {f"cpu_ms_per_request_{side}": statistics.median(found) for side, found in costs.items()}
    figures[f"cpu_us_per_token_added_{ROWS}_rows"] = statistics.median(added_us)
    for other in costs.keys() - SIDES.keys():
        figures[f"cpu_per_request_vs_{other}"] = compute_ratio(costs, "one_hop", other)
        if "two_hops" in costs:
            figures[f"cpu_per_request_two_hops_vs_{other}"] = compute_ratio(costs, "two_hops", other)
    return dict(sorted(figures.items()))


if __name__ == "__main__":
    run_benchmark(__doc__, run)
