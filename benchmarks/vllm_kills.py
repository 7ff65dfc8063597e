"""Workers that compute with vLLM, killed between the steps of both stages: what becomes of tokens, results and blocks.

.venv-vllm/bin/python -m benchmarks.vllm_kills [--quick | --smoke] [--json FILE]

A prefill and a decode worker of a pipeline on Redis, both with vLLM in float32, and the demo model. Requests of all
lengths, greedy and sampled, are under way all the time. Each worker is started with an order to kill itself: at which
of its stage's points, and at the how manieth time it gets there, is drawn. When enough have died, both are started
without an order, and all requests end. The tokens must be those of the model undivided: `generate()` for greedy
requests, this project's own engine run alone for sampled ones. At last a prompt of many blocks is asked, both workers
are killed, and it is asked again.

    kills             processes that were killed
    kills_prefill, kills_decode
    requests          requests that were accepted
    lost              of these, without a result
    doubled           with two or more
    wrong             with other tokens, text or reason than the undivided model's
    prefix_blocks     full blocks of the prompt that is asked again
    prefix_missed     of these, computed again after both workers were killed
"""

import random
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import count
from typing import Any

from benchmarks.common import Arguments, run_benchmark
from benchmarks.systems import answer_requests, open_stack, read_results
from penstock import failpoints
from penstock.client.sync import Client
from penstock.local.processes import Child
from penstock.local.stack import ProcessSlot, Stack, WorkerSlot
from penstock.messages import Request, Result
from penstock.waiting import wait_until
from sim.workload import ExpectedAnswer, compute_answers, make_requests

NUM_KINDS, NUM_UNDER_WAY, MAX_TOKENS = 12, 6, 120
MAX_PASSES = {"prefill": 5, "decode": 30}
"""A worker is killed at latest when it gets to its point for the so manieth time."""
MAX_LIFE_S = 40.0
"""A worker is killed from outside after this time: some points are passed only where another worker has died."""
BLOCK, PATIENCE_S = 32, 240.0
POINTS = {"prefill": failpoints.PREFILL, "decode": failpoints.DECODE}
ENVIRONMENT = {
    "PENSTOCK_ENGINE_KIND": "vllm", "PENSTOCK_ENGINE_BLOCK_SIZE": str(BLOCK), "PENSTOCK_ENGINE_DTYPE": "float32",
    "PENSTOCK_ENGINE_DEVICE": "cpu", "PENSTOCK_ENGINE_POOL_MB": "64", "PENSTOCK_RECORD_MAX_ATTEMPTS": "100",
}  # fmt: skip


class KilledStack(Stack):
    """A stack whose workers kill themselves, each at a point and a time that are drawn."""

    chance: random.Random | None = None
    """Draws points and times; None: workers live."""

    def _start_child(self, slot: ProcessSlot, arguments: list[str], environment: Mapping[str, str]) -> Child:
        order: dict[str, str] = {}
        if isinstance(slot, WorkerSlot) and self.chance is not None:
            point, passes = self.chance.choice(POINTS[slot.stage]), self.chance.randint(1, MAX_PASSES[slot.stage])
            order = {"PENSTOCK_FAILPOINTS": f"{point}=kill@{passes}"}
        slot.failures = 0  # they are meant: it is started again at once
        return super()._start_child(slot, arguments, {**environment, **order})


class Load:
    """Requests that repeat each kind again and again, until it is over."""

    def __init__(self, kinds: list[Request]) -> None:
        self._kinds, self.is_over = kinds, False
        self.kind_of: dict[str, Request] = {}
        """By id: the request that it repeats."""

    def generate_requests(self) -> Iterator[dict[str, Any]]:
        """Yield requests."""
        for number in count():
            if self.is_over:
                return
            kind = self._kinds[number % len(self._kinds)]
            sampling = kind.sampling.model_dump(include={"max_tokens", "temperature", "top_k", "top_p", "seed"})
            self.kind_of[name := f"{kind.id}.{number}"] = kind
            yield {"id": name, "token_ids": kind.token_ids, **sampling}


def run_kills(stack: Stack, num_kills: int) -> Counter[str]:
    """Return how many workers of each stage were killed, at least `num_kills` in all."""
    killed, workers = Counter[str](), {worker.name: worker for worker in stack.workers}
    while killed.total() < num_kills:
        for worker in stack.workers:
            if worker.child is not None and time.monotonic() - worker.started_at > MAX_LIFE_S:
                worker.child.kill()
        for line in stack.restart_dead():
            worker = workers[line.split()[0]]
            if "status -9" not in line:
                raise SystemExit(f"not killed: {line}\n{stack.read_log_tail(worker)}")
            killed[worker.stage] += 1
            print(f"killed: {killed.total()} of {num_kills}", flush=True)
        time.sleep(0.05)
    return killed


def kill_workers(stack: Stack) -> None:
    """Kill both workers, and start them again."""
    for worker in stack.workers:
        if worker.child is not None:
            worker.child.kill()
            wait_until(lambda child=worker.child: not child.is_alive(), 30, "it is dead")  # type: ignore[misc]
    stack.restart_dead()
    stack.wait_until_ready(PATIENCE_S)


def run(given: Arguments) -> dict[str, float]:
    """Kill workers; return the figures."""
    kinds = make_requests(NUM_KINDS, "kills", MAX_TOKENS)
    expected, load, KilledStack.chance = compute_answers(kinds), Load(kinds), random.Random(17)
    prompt = kinds[-1].token_ids or []
    with (
        open_stack(KilledStack, ENVIRONMENT, pipeline="vllm-kills") as stack,
        Client(stack.addresses) as client,
        ThreadPoolExecutor(1) as pool,
    ):
        reading = pool.submit(list, answer_requests(client, load.generate_requests(), NUM_UNDER_WAY, PATIENCE_S))
        try:
            killed = run_kills(stack, given.choose_size(40, 4, 1))
        finally:
            KilledStack.chance, load.is_over = None, True
        kill_workers(stack)
        reading.result()
        for name in ("prefix-1", "prefix-2"):
            request_id = client.submit(id=name, token_ids=prompt, max_tokens=2, temperature=0.0)
            num_found = client.result(request_id, PATIENCE_S).usage.cached_tokens // BLOCK
            if name == "prefix-1":
                kill_workers(stack)
        # The worker that is killed last may have ended a stream whose result another one has to publish.
        with suppress(TimeoutError):
            wait_until(
                lambda: load.kind_of.keys() <= {one.id for one in read_results(stack)}, 30, "all end", every_s=0.5
            )
        results = read_results(stack)
    counts = Counter(result.id for result in results)
    num_blocks = (len(prompt) - 1) // BLOCK

    def is_right(result: Result) -> bool:
        found = ExpectedAnswer(list(result.token_ids or ()), result.text, result.finish_reason)
        return found == expected[load.kind_of[result.id].id]

    return {
        "kills": killed.total() + 4,
        "kills_prefill": killed["prefill"] + 2,
        "kills_decode": killed["decode"] + 2,
        "requests": len(load.kind_of),
        "lost": sum(not counts[request_id] for request_id in load.kind_of),
        "doubled": sum(number > 1 for number in counts.values()),
        "wrong": sum(not is_right(result) for result in results if result.id in load.kind_of),
        "prefix_blocks": num_blocks,
        "prefix_missed": num_blocks - num_found,
    }


if __name__ == "__main__":
    run_benchmark(__doc__, run)
