"""What an endpoint as the engine loses.

python -m benchmarks.endpoint [--quick | --smoke] [--json FILE] [--command COMMAND]

A server that counts (`sim/endpoint.py`) stands for the endpoint. Readers send 1,000 requests over a gateway and follow
their streams, and come back where a connection breaks. Meanwhile the server is killed five times and the gateway three
times; each comes back. An answer is whole if its text is ` 0 1 2 …` with every number once, for the reader and in the
result. With `--quick` there are 200 requests, and two kills and one.

`--command` puts a real server in its place, which calls its model `counting`, such as `vllm serve DIRECTORY
--served-model-name counting --port {port}` or `llama-server -m FILE --alias counting --port {port}`. An answer is whole
then if the reader has seen the text of the result; `other_text` counts those that are not what the server says
undisturbed, to one request at a time.
"""

import json
import os
import shlex
import signal
import sys
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass, field

import httpx

from benchmarks.common import Arguments, describe_machine, make_parser, report_figures
from benchmarks.systems import open_stack, read_results
from penstock.cli.up import build_endpoint_environment
from penstock.local.processes import Child, find_free_port, start_child
from penstock.local.stack import Stack
from penstock.messages import Result
from penstock.waiting import wait_until
from sim.endpoint import MODEL, write_numbers

NUM_READERS = 32
NUM_PIECES, PAUSE_S = 40, 0.02
START_TIMEOUT_S = 240.0
NUM_PROMPTS = 25
"""Different prompts for a real server."""
ANSWER_TIMEOUT_S = 300.0
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

    def add_event(self, event_id: str, data: str) -> None:
        """Add an event of the stream."""
        self.last_id = event_id or self.last_id
        if data == "[DONE]":
            self.is_over = True
            return
        found = json.loads(data)
        if "error" in found:
            self.error, self.is_over = str(found["error"]["code"]), True
        self.text += "".join(choice.get("text", "") for choice in found.get("choices", ()))


class Readers:
    """Sends requests over a gateway, and follows each stream to its end."""

    def __init__(self, url: str, prompts: Callable[[int], str]) -> None:
        """`prompts` gives the prompt of each request, by its number."""
        self._prompts = prompts
        self._client = httpx.Client(base_url=url, timeout=20.0, limits=httpx.Limits(max_connections=NUM_READERS))
        self.num_over = 0
        self._lock = threading.Lock()
        self.close = self._client.close

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
            body = {"model": MODEL, "prompt": self._prompts(reading.number), "max_tokens": NUM_PIECES, "stream": True,
                    "temperature": 0.0}  # fmt: skip
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
                        reading.add_event(event_id, value)
            elif response.status_code not in (429, 502, 503):
                reading.error, reading.is_over = f"HTTP {response.status_code}", True


def make_story_prompt(number: int) -> str:
    """Return the prompt of a request to a real server: one of a few."""
    return f"Once upon a time there were {number % NUM_PROMPTS + 2} little "


def start_endpoint(port: int, command: str) -> Child:
    """Start the server on a port: the one that counts, if no command is given."""
    counting = [sys.executable, "-m", "sim.endpoint", str(port), str(PAUSE_S)]
    return start_child(shlex.split(command.format(port=port)) or counting, name="endpoint")


def ask_undisturbed(endpoint: Child, port: int) -> dict[str, str]:
    """Return a real server's answers, by prompt."""
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=START_TIMEOUT_S) as client:

        def is_ready() -> bool:
            if not endpoint.is_alive():
                raise SystemExit("the server has ended: try the command by itself")
            with suppress(httpx.TransportError):
                return client.get("/v1/models").status_code == 200 and client.get("/health").status_code == 200
            return False

        wait_until(is_ready, START_TIMEOUT_S, "the server is ready")
        answers = {}
        for number in range(NUM_PROMPTS):
            prompt = make_story_prompt(number)
            body = {"model": MODEL, "prompt": prompt, "max_tokens": NUM_PIECES, "temperature": 0.0}
            answers[prompt] = str(client.post("/v1/completions", json=body).json()["choices"][0]["text"])
        return answers


def run_requests(
    num_requests: int, num_endpoint_kills: int, num_gateway_kills: int, command: str, how: type[Stack]
) -> dict[str, float]:
    """Return the figures of a run."""
    make_prompt, port = make_story_prompt if command else "{}|".format, find_free_port()
    kills = sorted(
        [((n + 1) / (num_endpoint_kills + 1), "endpoint") for n in range(num_endpoint_kills)]
        + [((n + 0.7) / (num_gateway_kills + 1), "gateway") for n in range(num_gateway_kills)]
    )
    endpoint = start_endpoint(port, command)
    undisturbed = ask_undisturbed(endpoint, port) if command else {}
    workers = {"prefill": 0, "decode": 0, "endpoint": 2, "gateway": find_free_port()}
    with open_stack(how, build_endpoint_environment([f"http://127.0.0.1:{port}"]), **workers) as stack:
        begun_s = time.monotonic()
        with closing(Readers(stack.gateway_url, make_prompt)) as readers, ThreadPoolExecutor(NUM_READERS) as pool:
            followed = [pool.submit(readers.follow, number) for number in range(num_requests)]
            while not all(one.done() for one in followed):
                if kills and readers.num_over >= kills[0][0] * num_requests:
                    _, whom = kills.pop(0)
                    print(f"{time.monotonic() - begun_s:6.1f} s: {readers.num_over} are over, {whom} is killed")
                    if whom == "endpoint":
                        os.killpg(endpoint.pid, signal.SIGKILL)  # vLLM's engine outlives its server
                        endpoint = start_endpoint(port, command)
                    elif stack.gateway is not None and stack.gateway.child is not None:
                        stack.gateway.child.kill()
                stack.restart_dead()
                time.sleep(0.05)
        stack.stop_workers()  # a stream ends a moment before its result is in the topic
        results = read_results(stack)
    endpoint.stop()
    readings = [one.result() for one in followed]
    ends = Counter(result.id for result in results)
    num_torn = count_torn(readings, results) if command else count_incomplete(readings, results)
    figures = {
        "requests": len(readings),
        "lost": max(0, len(readings) - len(ends)) + num_torn,
        "duplicated": sum(count - 1 for count in ends.values()),
        "stuck": sum(not reading.is_over for reading in readings),
        "ended_with_error": sum(result.error is not None for result in results),
        "seconds": time.monotonic() - begun_s,
    }
    if command:
        told = [one for one in readings if one.is_over and not one.error]
        figures["other_text"] = sum(one.text != undisturbed[make_prompt(one.number)] for one in told)
    return figures


def count_incomplete(readings: Iterable[Reading], results: Iterable[Result]) -> int:
    """Return how many answers of the server that counts are not whole, for a reader or in a result."""
    texts = [reading.text for reading in readings if reading.is_over and not reading.error]
    texts += [result.text for result in results if result.error is None]
    return sum(text != write_numbers(NUM_PIECES) for text in texts)


def count_torn(readings: Iterable[Reading], results: Iterable[Result]) -> int:
    """Return how many readers have seen another text than that of their request's result."""
    texts = {result.id: result.text for result in results}
    told = [reading for reading in readings if reading.is_over and not reading.error]
    return sum(reading.text != texts.get(reading.stream.rpartition("/")[2]) for reading in told)


@dataclass(frozen=True)
class Options(Arguments):
    """The arguments of all benchmarks; the command of a real server."""

    command: str = ""


def main() -> None:
    """Run and report."""
    parser = make_parser(__doc__)
    parser.add_argument("--command", default="", help="starts a real server on {port}")
    given = Options(**vars(parser.parse_args()))
    print(describe_machine())
    size = given.choose_size((1000, 5, 3), (200, 2, 1), (20, 1, 1))
    how = given.choose_stack()
    report_figures(run_requests(*size, given.command, how), given)


if __name__ == "__main__":
    main()
