"""A pipeline to look at: a server, forked workers, and load."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from penstock.client import Client
from penstock.local.stack import Stack
from penstock.local.valkey import ValkeyServer
from sim.forked import ForkedStack
from sim.waiting import PATIENCE_S

ENVIRONMENT = {
    "PENSTOCK_ENGINE_DTYPE": "float32", "PENSTOCK_ENGINE_DEVICE": "cpu", "PENSTOCK_ENGINE_POOL_MB": "32",
    "PENSTOCK_ENGINE_MAX_BATCH": "8", "PENSTOCK_KV_STORE_REDIS_MB": "0",
    "PENSTOCK_TESTING": '{"worker_heartbeat_s": 0.5}',
}  # fmt: skip
PROMPTS = (
    "In the beginning God created the heaven and the earth. And the earth was without form, and void",
    "The LORD is my shepherd; I shall not want",
    "And it came to pass in those days",
)


@contextlib.contextmanager
def start_pipeline(
    directory: Path, server: ValkeyServer, *, prefill: int = 1, decode: int = 2, auto: int = 0
) -> Iterator[Stack]:
    """Workers on a server that others may stop and start; nobody restarts a worker unless `restart_dead` is called."""
    with ForkedStack(
        directory, pipeline="demo", redis=server.url,
        prefill=prefill, decode=decode, auto=auto, environment=ENVIRONMENT,
    ) as stack:  # fmt: skip
        stack.wait_until_ready(PATIENCE_S)
        yield stack


def submit_requests(stack: Stack, num_requests: int, max_tokens: int) -> None:
    """So many requests, a part of them batch work; nobody reads the answers."""
    with Client(redis=stack.addresses.stream_url, pipeline=stack.addresses.pipeline) as client:
        for number in range(num_requests):
            client.submit(
                PROMPTS[number % len(PROMPTS)],
                max_tokens=max_tokens,
                priority_class="batch" if number % 4 == 3 else "interactive",
                temperature=0.8,
                seed=number,
            )
