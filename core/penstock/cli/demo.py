"""`penstock demo`: start everything, send three prompts and one over HTTP, print the tokens as they arrive, stop."""

import contextlib
import json
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from penstock.cli.generate import print_stream
from penstock.cli.up import READY_TIMEOUT_S, build_curl_body, choose_gateway_port, format_curl_command
from penstock.client.sync import Client
from penstock.errors import PenstockError
from penstock.local.kafka import find_or_start_kafka
from penstock.local.processes import find_free_port
from penstock.local.stack import Stack
from penstock.messages import Sampling

PROMPTS = (
    ("And it came to pass", Sampling(temperature=0.0, max_tokens=60)),
    (
        "In the beginning",
        Sampling(temperature=0.8, top_p=0.95, seed=7, max_tokens=60),
    ),
    ("The LORD is my shepherd", Sampling(temperature=0.8, top_k=40, seed=3, max_tokens=60)),
)


def demo(
    kafka: Annotated[bool, typer.Option("--kafka", help="On a real Kafka instead of Redis Streams.")] = False,
    since: Annotated[float, typer.Option(help="When it all began, seconds since the epoch.", hidden=True)] = 0.0,
) -> None:
    """Three prompts through topic, prefill worker, KV store, topic, decode worker and Redis."""
    console = Console(highlight=False, soft_wrap=True)
    with tempfile.TemporaryDirectory(prefix="penstock-demo-") as name, contextlib.ExitStack() as exits:
        directory = Path(name)
        bootstrap = ""
        if kafka:
            console.print("starting Kafka", style="dim")
            bootstrap = exits.enter_context(find_or_start_kafka(directory / "kafka"))
        gateway = choose_gateway_port(find_free_port())
        parts = "a prefill and a decode worker" if gateway is None else "a prefill and a decode worker and a gateway"
        console.print(f"starting Redis, {parts}{' on Kafka' if kafka else ''}", style="dim")
        stack = exits.enter_context(Stack(directory, kafka=bootstrap, gateway=gateway))
        stack.wait_until_ready(READY_TIMEOUT_S, lambda line: console.print(f"  {line}", style="dim"))
        client = exits.enter_context(Client(stack.addresses))
        for number, (prompt, sampling) in enumerate(PROMPTS):
            begun_s = time.perf_counter()
            request_id = client.submit(prompt=prompt, **sampling.model_dump())
            console.print(f"\n{prompt}", style="bold", end="")
            times = print_stream(client.stream(request_id), begun_s, notes=console)
            if number == 0 and since:
                first_s = time.time() - (time.perf_counter() - times[0])
                console.print(
                    f"[{first_s - since:.0f} s from `make` to this first token, everything included]",
                    style="dim",
                    markup=False,
                )
        if gateway is not None:
            console.print(f"\n$ {format_curl_command(stack.gateway_url)}", style="bold", markup=False)
            stream_over_http(stack.gateway_url)
            hint = f"[`penstock up` keeps all this running, its gateway on port {choose_gateway_port(None)}]"
            console.print(hint, style="dim", markup=False)


def stream_over_http(gateway_url: str) -> None:
    """Send what the `curl` command sends, and print the text of each event."""
    body = json.dumps(build_curl_body()).encode()
    with urllib.request.urlopen(f"{gateway_url}/v1/completions", body, timeout=60.0) as answer:
        for line in answer:
            if line.startswith(b"data: {"):
                chunk = json.loads(line.removeprefix(b"data: "))
                if "error" in chunk:
                    raise PenstockError(chunk["error"]["message"])
                sys.stdout.write(chunk["choices"][0]["text"])
                sys.stdout.flush()
    sys.stdout.write("\n")
