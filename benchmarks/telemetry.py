"""What telemetry costs: throughput of the embedded pipeline with everything on, over everything off.

python -m benchmarks.telemetry [--quick | --smoke] [--json FILE]

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

from benchmarks.common import TIMEOUT_S, Arguments, describe_machine, format_spread, parse_arguments, report_figures
from benchmarks.pipeline import PipelineSide, make_prompts, run_in_turns
from penstock.client.sync import Client
from penstock.config.settings import BusSettings
from penstock.local.processes import find_free_port
from penstock.local.stack import Stack
from penstock.ops.live import LiveWatch
from penstock.waiting import wait_until

ENVIRONMENT = {
    "PENSTOCK_ENGINE_DTYPE": "float32",
    "PENSTOCK_ENGINE_DEVICE": "cpu",
    "PENSTOCK_ENGINE_POOL_MB": "128",
    "PENSTOCK_ENGINE_MAX_BATCH": "32",
}
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
    with OtlpReceiver(("127.0.0.1", 0), _Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


@contextlib.contextmanager
def repeat_in_background(what: Callable[[], object]) -> Iterator[None]:
    """Call `what` each second on a thread. An error of it ends the benchmark when the context ends."""
    over, failed = threading.Event(), list[Exception]()

    def run() -> None:
        while not over.wait(SCRAPE_INTERVAL_S):
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


def scrape_metrics(port: int) -> None:
    """Scrape a worker as Prometheus does."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
        assert b"penstock_tokens_total" in answer.read()


@contextlib.contextmanager
def watch_stack(stack: Stack, ports: list[int]) -> Iterator[None]:
    """Let scrapers and a `LiveWatch` read this pipeline."""
    watch = LiveWatch(stack.addresses, BusSettings())
    with contextlib.ExitStack() as exits:
        for port in ports:
            exits.enter_context(repeat_in_background(partial(scrape_metrics, port)))
        exits.enter_context(repeat_in_background(watch.read_latest))
        yield


@contextlib.contextmanager
def open_sides(how: type[Stack]) -> Iterator[dict[str, Callable[[int, int, int], float]]]:
    """Start both; each returns tokens per second, given a seed, and a number of prompts and of tokens each."""
    with contextlib.ExitStack() as exits:
        directory = Path(exits.enter_context(tempfile.TemporaryDirectory(prefix="penstock-benchmark-")))
        port, to = find_free_port(), exits.enter_context(start_receiver())
        told = {
            "PENSTOCK_TELEMETRY_PORT": str(port),
            "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{to.server_port}",
            "OTEL_METRIC_EXPORT_INTERVAL": "5000",
        }
        stacks = {
            OFF: how(directory / OFF, environment=ENVIRONMENT | {"PENSTOCK_TELEMETRY": "off"}),
            ON: how(directory / ON, environment=ENVIRONMENT | told),
        }
        made: dict[str, Callable[[int, int, int], float]] = {}
        for name, stack in stacks.items():
            exits.enter_context(stack).wait_until_ready(300)
            piped = PipelineSide(exits.enter_context(Client(stack.addresses)))

            def once(seed: int, load: int, max_new: int, name: str = name, piped: PipelineSide = piped) -> float:
                looks = watch_stack(stacks[ON], [port, port + 1]) if name == ON else contextlib.nullcontext()
                with looks:
                    return piped.measure_tokens_per_s(make_prompts(random.Random(seed), load, 32, 160), max_new)

            made[name] = once
        yield made
        wait_until(lambda: to.num_posts > 0, TIMEOUT_S, "something came by OTLP: what was measured is everything")


def run(given: Arguments) -> dict[str, float]:
    """Measure and print; return the figures."""
    rounds, load, max_new = given.choose_size((16, 160, 64), (6, 96, 64), (1, 4, 8))
    return measure_ratio(given.choose_stack(), rounds, load, max_new)


def measure_ratio(how: type[Stack], rounds: int, load: int, max_new: int) -> dict[str, float]:
    """Run both sides in turn; each round has the same prompts on both, and no other round has them."""
    with open_sides(how) as both:
        for name in both:
            both[name](-1, 8, 8)
        begun_s = time.perf_counter()
        rates = run_in_turns(rounds, list(both), "throughput", lambda name, number: [both[name](number, load, max_new)])
        print(f"{describe_machine()}; demo model, float32; {time.perf_counter() - begun_s:.0f} s")
    for name, found in rates.items():
        print(f"telemetry {name:4} throughput {format_spread(found):28} tokens/s")
    return {"telemetry_throughput_ratio": statistics.median(rates[ON]) / statistics.median(rates[OFF])}


def main() -> None:
    given = parse_arguments(__doc__ or "")
    report_figures(run(given), given)


if __name__ == "__main__":
    main()
