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
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import redis

from benchmarks.common import SHM, Arguments, describe_machine, format_spread, parse_arguments, report_figures
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

    def run_round(self, round_name: str, num_requests: int) -> float:
        """Run one round; return what an append costs, in us."""
        claims = [self._claim_request(f"{round_name}-{number}") for number in range(num_requests)]
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


@contextmanager
def open_sides() -> Iterator[tuple[Side, Side]]:
    """Start a side with one server, and one with two."""
    with tempfile.TemporaryDirectory(dir=SHM) as directory, ExitStack() as stack:
        yield Side(Path(directory), 1, stack), Side(Path(directory), 2, stack)


def main(given: Arguments) -> None:
    """Measure and report."""
    num_rounds = given.choose_size(60, 12, 1)
    costs_us: dict[str, list[float]] = {"1": [], "2": [], "split": []}
    with open_sides() as (one, two):
        runs = [("1", one, BATCH_REQUESTS), ("2", two, 2 * BATCH_REQUESTS), ("split", two, BATCH_REQUESTS)]
        for number in range(-2, num_rounds):  # the first two are for warming up
            for name, side, num_requests in runs[:: 1 if number % 2 else -1]:
                cost_us = side.run_round(f"{name}-{number}", num_requests)
                costs_us[name] += [cost_us] if number >= 0 else []
        shares = two.compute_shares()
    print(f"server time an append in us, {describe_machine()}")
    for name, found in costs_us.items():
        print(f"{name:6} {format_spread(found)}")

    def ratio(name: str) -> float:
        return statistics.median(b / a for a, b in zip(costs_us["1"], costs_us[name], strict=True))

    cost_1, cost_2, cost_split = (statistics.median(found) for found in costs_us.values())
    figures = {
        "append_cpu_us_1": cost_1,
        "append_cpu_us_2": cost_2,
        "append_cpu_ratio": ratio("2"),
        "append_cpu_ratio_goal": GOAL_RATIO,
        "append_cpu_us_split": cost_split,
        "append_cpu_ratio_split": ratio("split"),
        "append_share_1": shares[0],
        "append_share_2": shares[1],
        "append_share_goal_least": GOAL_SHARES[0],
        "append_share_goal_most": GOAL_SHARES[1],
    }
    report_figures(figures, given)


if __name__ == "__main__":
    main(parse_arguments(__doc__.partition("\n")[0]))
