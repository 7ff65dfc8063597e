"""What telemetry costs: throughput of the embedded pipeline with everything on, over everything off.

python -m benchmarks.telemetry [--quick] [--json FILE]

On: `/metrics` of both workers is scraped each second, spans are kept in Redis and sent by OTLP with the figures to a
receiver on this machine, and a `LiveWatch` looks each second. Off: `PENSTOCK_TELEMETRY=off`. The sides take turns in
one run. Both stacks are up all the time, one of them idle; only the side whose turn it is is scraped and looked at.
Throughput is output tokens per second of many requests sent at once, until the last one's end was read.
"""

import contextlib
import random
import statistics
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from benchmarks.common import Arguments, arguments, machine, report, spread
from benchmarks.pipeline import Piped, measure, prompts
from penstock.client.sync import Client
from penstock.config.settings import BusSettings
from penstock.local.processes import find_free_port
from penstock.local.stack import Stack
from penstock.ops.live import LiveWatch

ENVIRONMENT = {
    "PENSTOCK_ENGINE_DTYPE": "float32",
    "PENSTOCK_ENGINE_DEVICE": "cpu",
    "PENSTOCK_ENGINE_POOL_MB": "128",
    "PENSTOCK_ENGINE_MAX_BATCH": "32",
}
EVERY_S = 1.0
OFF, ON = "off", "on"


class Received(ThreadingHTTPServer):
    """Takes OTLP, and counts it."""

    daemon_threads = True
    num_posts = 0


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        assert isinstance(self.server, Received)
        self.rfile.read(int(self.headers["content-length"]))
        self.server.num_posts += 1
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@contextlib.contextmanager
def receiver() -> Iterator[Received]:
    """One that is up, on a free port."""
    with Received(("127.0.0.1", 0), _Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


@contextlib.contextmanager
def repeating(what: Callable[[], object]) -> Iterator[None]:
    """`what`, each second, by a thread; an error of it ends the benchmark when the context does."""
    over, failed = threading.Event(), list[Exception]()

    def run() -> None:
        while not over.wait(EVERY_S):
            try:
                what()
            except Exception as error:  # raised below
                failed.append(error)
                return

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
    for error in failed:
        raise error


def scrape(port: int) -> None:
    """As Prometheus does."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
        assert b"penstock_tokens_total" in answer.read()


@contextlib.contextmanager
def watched(stack: Stack, ports: list[int]) -> Iterator[None]:
    """All that looks at a pipeline looks at this one."""
    watch = LiveWatch(stack.addresses, BusSettings())
    with contextlib.ExitStack() as exits:
        for port in ports:
            exits.enter_context(repeating(partial(scrape, port)))
        exits.enter_context(repeating(watch.read_latest))
        yield


@contextlib.contextmanager
def sides() -> Iterator[dict[str, Callable[[int, int, int], float]]]:
    """Both, up and warm: tokens a second of a load, given a seed, so many prompts, and so many tokens for each."""
    with contextlib.ExitStack() as exits:
        directory = Path(exits.enter_context(tempfile.TemporaryDirectory(prefix="penstock-benchmark-")))
        port, to = find_free_port(), exits.enter_context(receiver())
        told = {
            "PENSTOCK_TELEMETRY_PORT": str(port),
            "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{to.server_port}",
            "OTEL_METRIC_EXPORT_INTERVAL": "5000",
        }
        stacks = {
            OFF: Stack(directory / OFF, environment=ENVIRONMENT | {"PENSTOCK_TELEMETRY": "off"}),
            ON: Stack(directory / ON, environment=ENVIRONMENT | told),
        }
        made: dict[str, Callable[[int, int, int], float]] = {}
        for name, stack in stacks.items():
            exits.enter_context(stack).wait_until_ready(300)
            piped = Piped(exits.enter_context(Client(stack.addresses)))

            def once(seed: int, load: int, max_new: int, name: str = name, piped: Piped = piped) -> float:
                looks = watched(stacks[ON], [port, port + 1]) if name == ON else contextlib.nullcontext()
                with looks:
                    return piped.tokens_per_s(prompts(random.Random(seed), load, 32, 160), max_new)

            made[name] = once
        yield made
        if not to.num_posts:
            raise RuntimeError("nothing came by OTLP: what was measured is not everything")


def run(given: Arguments) -> dict[str, float]:
    """Measure and print; returns the figures."""
    rounds, load, max_new = (6, 96, 64) if given.quick else (16, 160, 64)
    return measured(rounds, load, max_new)


def measured(rounds: int, load: int, max_new: int) -> dict[str, float]:
    """Both sides in turn; each round has the same prompts on both, and no other round has them."""
    with sides() as both:
        for name in both:
            both[name](-1, 8, 8)
        begun_s = time.perf_counter()
        rates = measure(rounds, list(both), "throughput", lambda name, number: [both[name](number, load, max_new)])
        print(f"{machine()}; demo model, float32; {time.perf_counter() - begun_s:.0f} s")
    for name, found in rates.items():
        print(f"telemetry {name:4} throughput {spread(found):28} tokens/s")
    return {"telemetry_throughput_ratio": statistics.median(rates[ON]) / statistics.median(rates[OFF])}


def main() -> None:
    given = arguments(__doc__ or "")
    report(run(given), given)


if __name__ == "__main__":
    main()
