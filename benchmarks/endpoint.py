"""What an endpoint as the engine loses: `python -m benchmarks.endpoint [--quick] [--json FILE]`.

A server that counts (`sim/endpoint.py`) stands for the endpoint. Readers send 1,000 requests over a gateway and follow
their streams, and come back where a connection breaks. Meanwhile the server is killed five times and the gateway three
times; each comes back. An answer is whole if its text is ` 0 1 2 …` with every number once, for the reader and in the
result. With `--quick` there are 200 requests, and two kills and one.
"""

import sys
import tempfile
import threading
import time
import uuid
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from benchmarks.common import describe_machine, parse_arguments, report_figures
from penstock.bus.connect import connect_bus
from penstock.cli.up import build_endpoint_environment
from penstock.config.settings import BusSettings
from penstock.local.processes import Child, find_free_port, start_child
from penstock.local.stack import Stack
from penstock.messages import Result, decode_message
from penstock.names import Pipeline
from sim.endpoint import MODEL, write_numbers

NUM_READERS = 32
NUM_PIECES, PAUSE_S = 40, 0.02
ANSWER_TIMEOUT_S = 180.0
"""A reader gives up after this time; its request counts as stuck."""


@dataclass
class Reading:
    """What a reader saw of one request."""

    number: int
    key: str = field(default_factory=lambda: uuid.uuid4().hex)
    stream: str = ""
    """The path at which the stream can be read again."""
    last_id: str = ""
    text: str = ""
    is_over: bool = False
    error: str = ""


class Readers:
    """Sends requests over a gateway, and follows each stream to its end."""

    def __init__(self, url: str) -> None:
        self._client = httpx.Client(base_url=url, timeout=20.0, limits=httpx.Limits(max_connections=NUM_READERS))
        self.num_over = 0
        self._lock = threading.Lock()

    def follow(self, number: int) -> Reading:
        """Return what was seen of a request, once it is over or the time is."""
        reading, until = Reading(number), time.monotonic() + ANSWER_TIMEOUT_S
        while not reading.is_over and time.monotonic() < until:
            with suppress(httpx.TransportError):
                self._read_on(reading)
            if not reading.is_over:
                time.sleep(0.1)
        with self._lock:
            self.num_over += 1
        return reading

    def _read_on(self, reading: Reading) -> None:
        headers = {"Last-Event-ID": reading.last_id} if reading.last_id else {}
        if reading.stream:
            answer = self._client.stream("GET", reading.stream, headers=headers)
        else:
            body = {"model": MODEL, "prompt": f"{reading.number}|", "max_tokens": NUM_PIECES, "stream": True}
            answer = self._client.stream("POST", "/v1/completions", json=body, headers={"Idempotency-Key": reading.key})
        with answer as response:
            if response.status_code == 200:
                reading.stream = reading.stream or response.headers["location"]
                event_id = ""
                for line in response.iter_lines():
                    name, _, value = line.partition(": ")
                    if name == "id":
                        event_id = value
                    elif name == "data":
                        self._take(reading, event_id, value)
            elif response.status_code not in (429, 502, 503):
                reading.error, reading.is_over = f"HTTP {response.status_code}", True

    def _take(self, reading: Reading, event_id: str, data: str) -> None:
        reading.last_id = event_id or reading.last_id
        if data == "[DONE]":
            reading.is_over = True
            return
        found: dict[str, Any] = httpx.Response(200, text=data).json()
        if "error" in found:
            reading.error, reading.is_over = str(found["error"]["code"]), True
        reading.text += "".join(choice.get("text", "") for choice in found.get("choices", ()))

    def close(self) -> None:
        """Close all connections."""
        self._client.close()


def start_endpoint(port: int) -> Child:
    """Start the server on a port."""
    return start_child([sys.executable, "-m", "sim.endpoint", str(port), str(PAUSE_S)], name="endpoint")


def run_requests(num_requests: int, num_endpoint_kills: int, num_gateway_kills: int) -> dict[str, float]:
    """Return the figures of a run."""
    port, gateway_port = find_free_port(), find_free_port()
    kills = sorted(
        [((n + 1) / (num_endpoint_kills + 1), "endpoint") for n in range(num_endpoint_kills)]
        + [((n + 0.7) / (num_gateway_kills + 1), "gateway") for n in range(num_gateway_kills)]
    )
    endpoint = start_endpoint(port)
    with tempfile.TemporaryDirectory() as folder:
        environment = build_endpoint_environment([f"http://127.0.0.1:{port}"])
        stack = Stack(
            Path(folder), prefill=0, decode=0, endpoint=2, gateway=gateway_port, environment=environment, port=None
        )
        with stack:
            stack.wait_until_ready(120.0)
            readers, begun_s = Readers(stack.gateway_url), time.monotonic()
            with ThreadPoolExecutor(NUM_READERS) as pool:
                followed = [pool.submit(readers.follow, number) for number in range(num_requests)]
                while not all(one.done() for one in followed):
                    if kills and readers.num_over >= kills[0][0] * num_requests:
                        _, whom = kills.pop(0)
                        print(f"{time.monotonic() - begun_s:6.1f} s: {readers.num_over} are over, {whom} is killed")
                        if whom == "endpoint":
                            endpoint.kill()
                            endpoint = start_endpoint(port)
                        elif stack.gateway is not None and stack.gateway.child is not None:
                            stack.gateway.child.kill()
                    stack.restart_dead()
                    time.sleep(0.05)
            readers.close()
            bus = connect_bus(stack.addresses, BusSettings())
            messages = bus.read_all(Pipeline(stack.addresses.pipeline).results_topic)
            results = [decode_message(Result, message.value) for message in messages]
        endpoint.stop()
    return count_figures(followed, results, time.monotonic() - begun_s)


def count_figures(followed: list["Future[Reading]"], results: list[Result], took_s: float) -> dict[str, float]:
    """Return what was lost (no result, or not the whole text), came twice, got stuck or ended with an error."""
    readings, whole = [one.result() for one in followed], write_numbers(NUM_PIECES)
    ends = Counter(result.id for result in results)
    texts = [reading.text for reading in readings if reading.is_over and not reading.error]
    texts += [result.text for result in results if result.error is None]
    return {
        "requests": len(readings),
        "lost": max(0, len(readings) - len(ends)) + sum(text != whole for text in texts),
        "duplicated": sum(count - 1 for count in ends.values()),
        "stuck": sum(not reading.is_over for reading in readings),
        "ended_with_error": sum(result.error is not None for result in results),
        "seconds": took_s,
    }


def main() -> None:
    """Run and report."""
    given = parse_arguments(__doc__ or "")
    print(describe_machine())
    report_figures(run_requests(200, 2, 1) if given.quick else run_requests(1000, 5, 3), given)


if __name__ == "__main__":
    main()
