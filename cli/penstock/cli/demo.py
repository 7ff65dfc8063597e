"""`penstock demo`: start everything, send three prompts and one over HTTP, print the tokens as they arrive, stop.

The three are sent at once, so both workers read some: the prefill worker hands off what it reads, the auto worker
answers what it reads, and what was handed off.
"""

import contextlib
import json
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from penstock.cli.up import READY_TIMEOUT_S, build_curl_body, choose_gateway_port, format_curl_command
from penstock.client.core import Event
from penstock.client.sync import Client
from penstock.config.addresses import Addresses
from penstock.config.settings import load_settings
from penstock.errors import PenstockError, SettingsError
from penstock.local.processes import find_free_port
from penstock.local.stack import Stack
from penstock.messages import EndEvent, Sampling
from penstock.own_servers import ask_own

PROMPTS = (
    ("And it came to pass", Sampling(temperature=0.0, max_tokens=60)),
    (
        "In the beginning",
        Sampling(temperature=0.8, top_p=0.95, seed=7, max_tokens=60),
    ),
    ("The LORD is my shepherd;", Sampling(temperature=0.8, top_k=40, seed=3, max_tokens=60)),
)
"""On Kafka their beginnings choose three of the four partitions, of which each worker reads two: both read a prompt."""
MAX_ROUNDS = 5
"""How often the prompts are sent until a request was handed off and another one stayed."""


def demo(
    kafka: Annotated[bool, typer.Option("--kafka", help="On the Kafka of PENSTOCK_KAFKA.")] = False,
    since: Annotated[float, typer.Option(help="When it all began, seconds since the epoch.", hidden=True)] = 0.0,
) -> None:
    """Three prompts through a prefill and an auto worker: some are handed off, others answered in one hop."""
    bootstrap = load_settings(Addresses).kafka if kafka else ""
    if kafka and not bootstrap:
        raise SettingsError("--kafka: set PENSTOCK_KAFKA=HOST:PORT, or run `make demo-kafka` in a checkout")
    console = Console(highlight=False, soft_wrap=True)
    with tempfile.TemporaryDirectory(prefix="penstock-demo-") as name, contextlib.ExitStack() as exits:
        gateway = choose_gateway_port(find_free_port())
        parts = f"a prefill and an auto worker{'' if gateway is None else ' and a gateway'}"
        console.print(f"starting Redis, {parts}{' on Kafka' if kafka else ''}", style="dim")
        stack = exits.enter_context(Stack(Path(name), kafka=bootstrap, decode=0, auto=1, gateway=gateway))
        stack.wait_until_ready(READY_TIMEOUT_S, lambda line: console.print(f"  {line}", style="dim"))
        client = exits.enter_context(Client(stack.addresses))
        ways = ask_all(client, console, since)
        for _ in range(MAX_ROUNDS - 1):
            if len(ways) == 1:
                ways |= ask_all(client, console)
        if gateway is not None:
            console.print(f"\n$ {format_curl_command(stack.gateway_url)}", style="bold", markup=False)
            stream_over_http(stack.gateway_url)
            hint = f"[`penstock up` keeps a stack running, its gateway on port {choose_gateway_port(None)}]"
            console.print(hint, style="dim", markup=False)


def ask_all(client: Client, console: Console, since: float = 0.0) -> set[str]:
    """Send the prompts at once, and print the answers one after the other. Return the ways that they went."""
    asked = [(prompt, client.submit(prompt=prompt, **sampling.model_dump())) for prompt, sampling in PROMPTS]
    ways = set[str]()
    for number, (prompt, request_id) in enumerate(asked):
        console.print(f"\n{prompt}", style="bold", end="")
        end = print_answer(client.stream(request_id))
        way = "handed off" if end.timings.handed_off else "in one hop"
        ways.add(way)
        console.print(f"[{describe_speed(end)}, {way}]", style="dim", markup=False)
        if number == 0 and since:
            told = f"{end.timings.first_token - since:.0f} s from `make` to this first token, everything included"
            console.print(f"[{told}]", style="dim", markup=False)
    return ways


def print_answer(events: Iterable[Event]) -> EndEvent:
    """Print a stream's text as it arrives, and return its end. Raise the request's error."""
    for event in events:
        sys.stdout.write(event.text)
        sys.stdout.flush()
    sys.stdout.write("\n")
    assert isinstance(event, EndEvent), "a stream has an end"
    return event


def describe_speed(end: EndEvent) -> str:
    """Return the time to the first token and the tokens/s of an answer, as its workers measured them."""
    times, num_tokens = end.timings, end.usage.completion_tokens
    first_ms = 1000 * (times.first_token - times.published)
    rate = (num_tokens - 1) / (times.finished - times.first_token)
    return f"{num_tokens} tokens, first after {first_ms:.0f} ms, {rate:.0f} tokens/s"


def stream_over_http(gateway_url: str) -> None:
    """Send what the `curl` command sends, and print the text of each event."""
    body = json.dumps(build_curl_body()).encode()
    with ask_own(f"{gateway_url}/v1/completions", body) as answer:
        for line in answer:
            if line.startswith(b"data: {"):
                chunk = json.loads(line.removeprefix(b"data: "))
                if "error" in chunk:
                    raise PenstockError(chunk["error"]["message"])
                sys.stdout.write(chunk["choices"][0]["text"])
                sys.stdout.flush()
    sys.stdout.write("\n")
