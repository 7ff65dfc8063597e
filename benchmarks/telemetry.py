"""What telemetry costs: throughput of the embedded pipeline with everything on, over everything off.

python -m benchmarks.telemetry [--quick | --smoke] [--json FILE]

On: `/metrics` of both workers is scraped each second, spans are kept in Redis and sent by OTLP with the figures to a
receiver on this machine, and a `LiveWatch` looks each second. Off: `PENSTOCK_TELEMETRY=off`. Both stacks are up all the
time; only the side whose turn it is is scraped and looked at.
"""

import contextlib
import random
import statistics
import threading
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from benchmarks.common import TIMEOUT_S, Arguments, run_benchmark
from benchmarks.comparison import measure_in_turns, print_table
from benchmarks.pipeline import PipelineSide, make_prompts
from benchmarks.systems import DEMO_ENVIRONMENT, open_stack
from penstock.client.sync import Client
from penstock.config.settings import BusSettings
from penstock.local.processes import find_free_port
from penstock.local.stack import Stack
from penstock.ops.live import LiveWatch
from penstock.waiting import wait_until

ENVIRONMENT = DEMO_ENVIRONMENT | {"PENSTOCK_ENGINE_POOL_MB": "128", "PENSTOCK_ENGINE_MAX_BATCH": "32"}
SCRAPE_INTERVAL_S = 1.0
OFF, ON = "off", "on"


class OtlpReceiver(ThreadingHTTPServer):
    """Receives OTLP, and counts the posts."""

    daemon_threads = True
    num_posts = 0


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        assert isinstance(self.server, OtlpReceiver)
        self.rfile.read(int(self.headers["content-length"]))
        self.server.num_posts += 1
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@contextlib.contextmanager
def start_receiver() -> Iterator[OtlpReceiver]:
    """Start a receiver on a free port."""
    with OtlpReceiver(("127.0.0.1", 0), _Handler) as server, ThreadPoolExecutor(1) as pool:
        pool.submit(server.serve_forever)
        try:
            yield server
        finally:
            server.shutdown()


@contextlib.contextmanager
def observe_stack(stack: Stack, ports: list[int]) -> Iterator[None]:
    """Scrape this pipeline's workers as Prometheus does, and let a `LiveWatch` look, each second on a thread. An error
    of that ends the benchmark when the context ends.
    """
    watch, over = LiveWatch(stack.addresses, BusSettings()), threading.Event()

    def scrape_and_look() -> None:
        while not over.wait(SCRAPE_INTERVAL_S):
            for port in ports:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
                    assert b"penstock_tokens_total" in answer.read()
            watch.read_latest()

    with ThreadPoolExecutor(1) as pool:
        observing = pool.submit(scrape_and_look)
        try:
            yield
        finally:
            over.set()
        observing.result()


def run(given: Arguments) -> dict[str, float]:
    """Measure and print; return the figures. Each round has the same prompts on both sides, and no other has them."""
    rounds, load, max_new = given.choose_size((16, 160, 64), (6, 96, 64), (1, 4, 8))
    with contextlib.ExitStack() as exits:
        port, to = find_free_port(), exits.enter_context(start_receiver())
        settings = {
            OFF: {"PENSTOCK_TELEMETRY": "off"},
            ON: {"PENSTOCK_TELEMETRY_PORT": str(port), "OTEL_METRIC_EXPORT_INTERVAL": "5000",
                 "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{to.server_port}"},
        }  # fmt: skip
        how = given.choose_stack()
        stacks = {name: exits.enter_context(open_stack(how, ENVIRONMENT | own)) for name, own in settings.items()}
        piped = {name: PipelineSide(exits.enter_context(Client(stack.addresses))) for name, stack in stacks.items()}

        def measure(name: str, number: int) -> float:
            with observe_stack(stacks[ON], [port, port + 1]) if name == ON else contextlib.nullcontext():
                return piped[name].measure_tokens_per_s(make_prompts(random.Random(number), load, 32, 160), max_new)

        for side in piped.values():
            side.measure_tokens_per_s(make_prompts(random.Random(-1), 8, 32, 160), 8)
        rates = measure_in_turns({name: partial(measure, name) for name in stacks}, rounds, "throughput")
        wait_until(lambda: to.num_posts > 0, TIMEOUT_S, "something came by OTLP: what was measured is everything")
    print_table({f"telemetry {name}": found for name, found in rates.items()}, "tokens/s; demo model, float32")
    return {"telemetry_throughput_ratio": statistics.median(rates[ON]) / statistics.median(rates[OFF])}


if __name__ == "__main__":
    run_benchmark(__doc__, run)
