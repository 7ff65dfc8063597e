"""What an append costs the servers where requests are spread over two of them, over one that has them all.

python -m benchmarks.streams [--quick | --smoke] [--json FILE]

A worker's record appends to its requests, a token each, as a decode worker does with each step; the requests are new in
each round. A server gets them in batches of about 32: of a worker with 32 requests on one server, and of one with 64 on
two. A worker with 32 on two is told apart: there the batches are half as large, and a batch has a price of its own. The
sides take turns in one run, and a ratio is the median of those of each turn. Time is the servers' own (`INFO cpu`), of
both where there are two.
"""

import statistics
import tempfile
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import redis

from benchmarks.common import SHM, Arguments, run_benchmark
from benchmarks.comparison import compute_ratio, measure_in_turns, print_table
from penstock.config.settings import RecordSettings
from penstock.local.valkey import ValkeyServer
from penstock.messages import EndEvent
from penstock.names import Pipeline
from penstock.record import AppendOutcome, Claim, Record, ShardedSession, connect_servers, open_record

BATCH_REQUESTS, NUM_STEPS = 32, 200
TOKEN_TEXT = " through"
GOAL_RATIO, GOAL_SHARES = 1.05, (0.45, 0.55)


class Side:
    """Some servers, and a worker's record on them."""

    def __init__(self, directory: Path, num_servers: int, stack: ExitStack) -> None:
        servers = [stack.enter_context(ValkeyServer(directory / f"{num_servers}-{n}")) for n in range(num_servers)]
        clients = connect_servers(",".join(f"{server.url}#s{n}" for n, server in enumerate(servers, 1)))
        self.clients = clients.parts
        self.record: Record = open_record(clients, Pipeline("streams"), RecordSettings(lease_s=30.0))
        stack.callback(self.record.close)
        self.sessions = ShardedSession(self.record, "worker")
        stack.callback(self.sessions.close)

    def run_round(self, num_requests: int, number: int) -> float:
        """Run one round; return what an append costs, in us."""
        claims = [self._claim_request(f"{num_requests}-{number}-{place}") for place in range(num_requests)]
        before_s = sum(map(read_cpu_s, self.clients))
        for step in range(NUM_STEPS):
            outcomes = self.record.append_tokens([(claim, claim.next_event(step, TOKEN_TEXT)) for claim in claims])
            assert set(outcomes) == {AppendOutcome.OK}
        used_s = sum(map(read_cpu_s, self.clients)) - before_s
        end = EndEvent.model_validate({"finish_reason": "length"})
        assert all(self.record.finish_all([(claim, end, "") for claim in claims]))
        return used_s / (num_requests * NUM_STEPS) * 1e6

    def _claim_request(self, request_id: str) -> Claim:
        claim = self.record.claim_decode(request_id, self.sessions.id, "job", b"message")
        assert isinstance(claim, Claim)
        return claim

    def compute_shares(self) -> list[float]:
        """Return each server's share of all appends."""
        calls = [count_tokens(client) for client in self.clients]
        return [one / sum(calls) for one in calls]


def read_cpu_s(client: "redis.Redis") -> float:
    """Return the processor time that a server has used."""
    used = client.info("cpu")
    return float(used["used_cpu_user"]) + float(used["used_cpu_sys"])


def count_tokens(client: "redis.Redis") -> int:
    """Return how many tokens are in a server's logs."""
    return sum(client.xlen(key) - 1 for key in client.scan_iter("penstock:streams:{*}:log"))


def run(given: Arguments) -> dict[str, float]:
    """Measure and print; return the figures."""
    with tempfile.TemporaryDirectory(dir=SHM) as directory, ExitStack() as stack:
        one, two = (Side(Path(directory), count, stack) for count in (1, 2))
        sides = {
            "1": partial(one.run_round, BATCH_REQUESTS),
            "2": partial(two.run_round, 2 * BATCH_REQUESTS),
            "split": partial(two.run_round, BATCH_REQUESTS),
        }
        costs_us = measure_in_turns(sides, given.choose_size(60, 12, 1), "appends", num_warm=2)
        shares = two.compute_shares()
    print_table(costs_us, "us of the servers' time an append")
    return {
        **{f"append_cpu_us_{name}": statistics.median(found) for name, found in costs_us.items()},
        "append_cpu_ratio": compute_ratio(costs_us, "2", "1"),
        "append_cpu_ratio_goal": GOAL_RATIO,
        "append_cpu_ratio_split": compute_ratio(costs_us, "split", "1"),
        "append_share_1": shares[0],
        "append_share_2": shares[1],
        "append_share_goal_least": GOAL_SHARES[0],
        "append_share_goal_most": GOAL_SHARES[1],
    }


if __name__ == "__main__":
    run_benchmark(__doc__, run)
