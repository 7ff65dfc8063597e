"""The real run of `benchmarks.regions`: two embedded regions of real processes, a round trip apart by relays.

Each region has a Redis, an `auto` worker with the demo model, and a gateway, all of them with their own settings. A
gateway reaches the other one through a relay that hands all on half a round trip later, either way.

    capacity   requests that say that they may not go on keep eight under way in the region `eu`
    near       new requests come to it at half and at four fifths of that rate, at random times
    overflow   more requests are kept in it than it answers in 5 s. New ones come to its gateway and, by turns with
               them, to that of the other region: the difference of the medians is what it adds to have come to the
               busy one
"""

import contextlib
import random
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from benchmarks.common import TIMEOUT_S, Arguments
from benchmarks.systems import DEMO_ENVIRONMENT, DEMO_TOKENS
from penstock.client.sync import Client
from penstock.local.processes import find_free_port
from penstock.local.stack import Stack
from penstock.regions import HOPS_HEADER, PEER_HEADER, REGION_HEADER
from sim.chaos.proxy import Proxy
from sim.waiting import wait_for

REGIONS = ("eu", "us")
SECRET = "of both regions, and long enough"
HERE = {PEER_HEADER: SECRET, HOPS_HEADER: "x;sooner, y;sooner"}
"""Headers of a request that came through two regions: it is answered where it comes to."""
NUM_BUSY = 8
"""The most sequences of a worker, and requests under way while the capacity is measured."""
PROMPT_TOKENS, ANSWER_TOKENS, BACKLOG_TOKENS = 64, 16, 256
WAIT_S, KEPT_WAIT_S = 5.0, 8.0
"""How long the busy region would have a new request wait, and how long it is made to."""


@dataclass(frozen=True)
class RunExtent:
    """How much is run."""

    capacity_s: float
    near_s: float
    """For each load."""
    num_pairs: int
    loads: tuple[float, ...] = (0.5, 0.8)


FULL, QUICK, SMOKE = RunExtent(15.0, 30.0, 60), RunExtent(8.0, 15.0, 40), RunExtent(1.0, 1.0, 1, (0.5,))


class Runner:
    """Sends requests to two regions."""

    def __init__(self, stacks: dict[str, Stack], exits: ExitStack) -> None:
        self._stacks, self._draws = stacks, random.Random(0)
        limits = httpx.Limits(max_connections=None)
        self._http = {
            name: exits.enter_context(httpx.Client(base_url=stack.gateway_url, timeout=TIMEOUT_S, limits=limits))
            for name, stack in stacks.items()
        }

    def make_body(self) -> dict[str, Any]:
        """Return a request whose prompt begins as no other does."""
        prompt = self._draws.choices(DEMO_TOKENS, k=PROMPT_TOKENS)
        return {"model": "demo", "prompt": prompt, "max_tokens": ANSWER_TOKENS, "temperature": 0, "stream": True}

    def ask(self, region: str, body: dict[str, Any], headers: dict[str, str]) -> tuple[str, float]:
        """Return where a request was answered and why, and the seconds until its first token."""
        begun_s = time.perf_counter()
        with self._http[region].stream("POST", "/v1/completions", json=body, headers=headers) as answer:
            lines = answer.iter_lines()
            first = next((line for line in lines if line.startswith("data: ")), answer.status_code)
            first_s = time.perf_counter() - begun_s
            assert answer.status_code == 200, first
            for _ in lines:
                pass
        return answer.headers[REGION_HEADER], first_s

    def see(self, region: str, other: str) -> dict[str, Any]:
        """Return how a region's gateway sees a region."""
        seen = self._http[region].get("/v1/penstock/regions").json()["regions"]
        found: dict[str, Any] = next(one for one in seen if one["name"] == other)
        return found

    def read_wait_s(self, region: str, other: str) -> float | None:
        """Return how long a new request would wait in a region, as the gateway of a region knows."""
        told = self.see(region, other)["models"].get("demo")
        wait_s: float | None = told and told["wait_s"]["interactive"]
        return wait_s

    def measure_capacity(self, length_s: float) -> float:
        """Return how many requests a second the first region answers by itself."""
        bodies, ends_s = [self.make_body() for _ in range(1000)], time.perf_counter() + length_s

        def keep_busy() -> int:
            count = 0
            while bodies and time.perf_counter() < ends_s:
                self.ask(REGIONS[0], bodies.pop(), HERE)
                count += 1
            return count

        begun_s = time.perf_counter()
        with ThreadPoolExecutor(NUM_BUSY) as pool:
            counts = [pool.submit(keep_busy) for _ in range(NUM_BUSY)]
            done = sum(count.result() for count in counts)
        return done / (time.perf_counter() - begun_s)

    def measure_near(self, rate: float, length_s: float) -> float:
        """Return the share of requests that stay in the first region, where they come at this rate."""
        told, at_s = list[Future[tuple[str, float]]](), 0.0
        with ThreadPoolExecutor(64) as pool:
            begun_s = time.perf_counter()
            while (at_s := at_s + self._draws.expovariate(rate)) < length_s or not told:
                time.sleep(max(0.0, begun_s + at_s - time.perf_counter()))
                told.append(pool.submit(self.ask, REGIONS[0], self.make_body(), {}))
            stayed = [one.result()[0].startswith(f"{REGIONS[0]};") for one in told]
        return sum(stayed) / len(stayed)

    @contextlib.contextmanager
    def kept_busy(self) -> Iterator[None]:
        """Let new requests wait in the first region for longer than `WAIT_S`, as both gateways know."""
        near, draws, is_over = REGIONS[0], random.Random(1), threading.Event()

        def add_requests() -> None:
            with Client(self._stacks[near].addresses) as client:
                while not is_over.wait(1.0):  # until what was added is told
                    for _ in range(NUM_BUSY if (self.read_wait_s(near, near) or 0.0) < KEPT_WAIT_S else 0):
                        prompt = draws.choices(DEMO_TOKENS, k=PROMPT_TOKENS)
                        client.submit(token_ids=prompt, max_tokens=BACKLOG_TOKENS)

        with ThreadPoolExecutor(1) as pool:
            adding = pool.submit(add_requests)
            try:
                wait_for(
                    lambda: adding.done() or all((self.read_wait_s(one, near) or 0.0) > WAIT_S for one in REGIONS),
                    "requests wait in the first region",
                )  # fmt: skip
                yield
            finally:
                is_over.set()
            adding.result()

    def measure_overflow(self, num_pairs: int) -> dict[str, float]:
        """Return what it adds to a first token to have come to the busy region's gateway, in the run's names."""
        near, far = REGIONS
        came, direct, waits_s = list[float](), list[float](), list[float]()
        with self.kept_busy():
            while len(direct) < num_pairs or not came:
                where, first_s = self.ask(near, self.make_body(), {})
                waits_s.append(self.read_wait_s(far, near) or 0.0)
                came += [first_s] if where.startswith(f"{far};") else []
                direct.append(self.ask(far, self.make_body(), HERE)[1])
            round_trip_s: float = self.see(near, far)["round_trip_s"]
        print(
            f"overflow: {len(came)} of {len(direct)} left, which would have waited {statistics.median(waits_s):.1f} s"
        )
        return {
            "run_overflow_left_share": len(came) / len(direct),
            "run_overflow_wait_s": statistics.median(waits_s),
            "run_overflow_round_trip_ms": 1000 * round_trip_s,
            "run_overflow_ttft_ms": 1000 * statistics.median(direct),
            "run_overflow_ttft_added_ms": 1000 * (statistics.median(came) - statistics.median(direct)),
        }


@contextlib.contextmanager
def open_regions(how: type[Stack], round_trip_s: float) -> Iterator[Runner]:
    """Start two regions that know each other."""
    with ExitStack() as exits:
        directory = Path(exits.enter_context(tempfile.TemporaryDirectory(prefix="penstock-regions-")))
        ports = {name: find_free_port() for name in REGIONS}
        relays = {name: exits.enter_context(Proxy(port)) for name, port in ports.items()}
        stacks = dict[str, Stack]()
        for name, peer in zip(REGIONS, reversed(REGIONS), strict=True):
            relays[name].delay_both_ways(round_trip_s / 2)
            told = {
                "PENSTOCK_REGION_NAME": name, "PENSTOCK_REGION_SECRET": SECRET,
                "PENSTOCK_REGION_PEERS": f"{peer}=http://127.0.0.1:{relays[peer].port}",
                "PENSTOCK_KV_STORE_SHARED_MB": "16", "PENSTOCK_KV_STORE_DISK_MB": "0", "PENSTOCK_WORKER_DRAIN_S": "1",
                "PENSTOCK_ENGINE_MAX_BATCH": str(NUM_BUSY),
            }  # fmt: skip
            stacks[name] = how(
                directory / name, prefill=0, decode=0, auto=1, gateway=ports[name], environment=DEMO_ENVIRONMENT | told
            ).start()
            exits.callback(stacks[name].stop)
        for stack in stacks.values():
            stack.wait_until_ready(300)
        yield Runner(stacks, exits)


def play_run(given: Arguments, round_trip_s: float) -> dict[str, float]:
    """Return the figures of the run."""
    extent = given.choose_size(FULL, QUICK, SMOKE)
    with open_regions(given.choose_stack(), round_trip_s) as runner:
        wait_for(lambda: runner.see(*REGIONS)["state"] == "ready", "the regions know each other")
        for region in REGIONS:
            for _ in range(3):  # what is slow once
                runner.ask(region, runner.make_body(), HERE)
        wait_for(lambda: runner.read_wait_s(REGIONS[0], REGIONS[1]) is not None, "a wait is known")
        capacity = runner.measure_capacity(extent.capacity_s)
        figures = {"run_capacity": capacity}
        for load in extent.loads:
            figures[f"run_near_share_{load * 100:.0f}"] = near = runner.measure_near(load * capacity, extent.near_s)
            print(f"near, {load:.0%} of {capacity:.2f} requests/s: {near:.3f} stay", flush=True)
        shares = [value for name, value in figures.items() if name.startswith("run_near_share_")]
        return figures | {"run_near_share": min(shares)} | runner.measure_overflow(extent.num_pairs)
