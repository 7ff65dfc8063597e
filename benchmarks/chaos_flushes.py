"""`benchmarks.chaos --flushes N`: the stream Redis loses everything in the middle of the load, again and again.

On Kafka alone, where requests and results are not in Redis. What such a loss may cost is in docs/protocol.md: a second
result, and a stream that has to be read anew. No request may be left without a result.
"""

import contextlib
import random
import time
from collections.abc import Mapping
from pathlib import Path

import redis

from penstock.local.kafka import SHORT_TIMEOUTS
from penstock.names import WorkerKind
from sim.chaos.checker import check_history, count_by_kind
from sim.chaos.clients import LONG_ANSWER_TOKENS, Clients, ClientTask, make_plain_task, prepare_known_requests
from sim.chaos.faults import ANY_TIME, KillPlan
from sim.chaos.fork_server import ForkServer
from sim.chaos.history import History, read_history
from sim.chaos.runner import POLL_S, Progress, record_topics, wait_until_calm
from sim.chaos.system import ChaosStack, Servers

NUM_WORKERS: Mapping[WorkerKind, int] = {"prefill": 2, "decode": 3}
MAX_OPEN_REQUESTS = 24
ANSWER_TIMEOUT_S = 90.0


def flush_often(
    directory: Path, fork_server: ForkServer, seed: int, flushes: int, progress: Progress
) -> dict[str, float]:
    """Run the load with flushes; return what became of the requests."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "history.jsonl"
    prepare_known_requests(LONG_ANSWER_TOKENS, "text")  # takes seconds: not in the middle of it
    with contextlib.ExitStack() as exits:
        history = exits.enter_context(History(path))
        servers = exits.enter_context(Servers(directory, "kafka", SHORT_TIMEOUTS))
        stack = ChaosStack(
            directory / "stack", fork_server, history, servers, lambda _, __: KillPlan(ANY_TIME, 1, 0.0), NUM_WORKERS
        )
        stack.is_killing = False
        exits.enter_context(stack)
        clients = exits.enter_context(
            Clients(history, stack.addresses, _make_task, MAX_OPEN_REQUESTS, ANSWER_TIMEOUT_S)
        )
        client = exits.enter_context(redis.Redis.from_url(servers.redis.url))
        _flush_repeatedly(stack, clients, client, history, random.Random(seed), flushes, progress)
        clients.stop_sending()
        wait_until_calm(stack, clients, ANSWER_TIMEOUT_S + 30.0, lambda line: progress(line, 0))
        record_topics(stack, history)
    counts = count_by_kind(check_history(entry for entry in read_history(path) if "reader" not in entry))
    return {
        "flushes": flushes,
        "flush_requests": len(clients.accepted_ids),
        "flush_duplicated": counts["duplicated"],
        "flush_lost": counts["lost"],
        "flush_wrong": counts["wrong"],
        "flush_stuck": count_by_kind(check_history(read_history(path)))["stuck"],
    }


def _make_task(number: int) -> ClientTask:
    return make_plain_task(f"f{number}", number, LONG_ANSWER_TOKENS)


def _flush_repeatedly(
    stack: ChaosStack, clients: Clients, client: "redis.Redis", history: History, chance: random.Random, flushes: int,
    progress: Progress,
) -> None:  # fmt: skip
    """Flush Redis repeatedly, each time after some more answers and a moment later."""
    for number in range(flushes):
        done, later_s = clients.num_done + chance.randint(8, 24), time.monotonic() + chance.uniform(0.2, 2.0)
        until_s = time.monotonic() + ANSWER_TIMEOUT_S
        while (clients.num_done < done or time.monotonic() < later_s) and time.monotonic() < until_s:
            stack.restart_dead()
            clients.raise_failure()
            progress(f"{number} of {flushes} flushes, {clients.num_done} of {clients.num_begun} answered", 0)
            time.sleep(POLL_S)
        history.add_entry("flush", number=number)
        client.flushall()
