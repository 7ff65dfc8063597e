"""`benchmarks.chaos --flushes N`: the stream Redis loses everything in the middle of the load, again and again.

On Kafka alone, where requests and results are not in Redis. What such a loss may cost is in docs/protocol.md: a second
result, and a stream that has to be read anew. No request may be left without a result.
"""

import contextlib
import random
import time
from pathlib import Path

import redis

from penstock.local.kafka import SHORT_TIMEOUTS
from sim.chaos.checker import check, tally
from sim.chaos.clients import LONG, Clients, Errand, known, plain
from sim.chaos.faults import ANY_TIME, Fate
from sim.chaos.history import History, read
from sim.chaos.nursery import Nursery
from sim.chaos.runner import TEND_S, Progress, calm, write_down
from sim.chaos.system import DoomedStack, Servers

SIZE = 2, 3
UNDER_WAY = 24
PATIENCE_S = 90.0


def flush_often(directory: Path, nursery: Nursery, seed: int, flushes: int, progress: Progress) -> dict[str, float]:
    """Carry it out; return what became of the requests."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "history.jsonl"
    known(LONG)  # takes seconds: not in the middle of it
    with contextlib.ExitStack() as exits:
        history = exits.enter_context(History(path))
        servers = exits.enter_context(Servers(directory, "kafka", SHORT_TIMEOUTS))
        stack = DoomedStack(directory / "stack", nursery, history, servers, lambda _, __: Fate(ANY_TIME, 1, 0.0), SIZE)
        stack.is_doomed = False
        exits.enter_context(stack)
        clients = exits.enter_context(Clients(history, stack.addresses, _errand, UNDER_WAY, PATIENCE_S))
        client = exits.enter_context(redis.Redis.from_url(servers.redis.url))
        _flush(stack, clients, client, history, random.Random(seed), flushes, progress)
        clients.stop()
        calm(stack, clients, PATIENCE_S + 30.0, lambda line: progress(line, 0))
        write_down(stack, history)
    counts = tally(check(entry for entry in read(path) if "reader" not in entry))
    return {
        "flushes": flushes,
        "flush_requests": len(clients.accepted),
        "flush_duplicated": counts["duplicated"],
        "flush_lost": counts["lost"],
        "flush_wrong": counts["wrong"],
        "flush_stuck": tally(check(read(path)))["stuck"],
    }


def _errand(number: int) -> Errand:
    return plain(f"f{number}", number, LONG)


def _flush(
    stack: DoomedStack, clients: Clients, client: "redis.Redis", history: History, chance: random.Random, flushes: int,
    progress: Progress,
) -> None:  # fmt: skip
    """Let Redis lose all it has, each time after some requests more were answered, and a moment later."""
    for number in range(flushes):
        done, later_s = clients.done + chance.randint(8, 24), time.monotonic() + chance.uniform(0.2, 2.0)
        until_s = time.monotonic() + PATIENCE_S
        while (clients.done < done or time.monotonic() < later_s) and time.monotonic() < until_s:
            stack.restart_dead()
            clients.check()
            progress(f"{number} of {flushes} flushes, {clients.done} of {clients.count} answered", 0)
            time.sleep(TEND_S)
        history.note("flush", number=number)
        client.flushall()
