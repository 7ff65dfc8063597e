"""`penstock demo`: start everything, send three prompts, print the tokens as they arrive; one more over HTTP; stop."""

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
from penstock.cli.up import READY_WITHIN_S, curl_body, curl_line, port_of_gateway
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
        gateway = port_of_gateway(find_free_port())
        parts = "a prefill and a decode worker" if gateway is None else "a prefill and a decode worker and a gateway"
        console.print(f"starting Redis, {parts}{' on Kafka' if kafka else ''}", style="dim")
        stack = exits.enter_context(Stack(directory, kafka=bootstrap, gateway=gateway))
        stack.wait_until_ready(READY_WITHIN_S, lambda line: console.print(f"  {line}", style="dim"))
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
            console.print(f"\n$ {curl_line(stack.gateway_url)}", style="bold", markup=False)
            print_answer(stack.gateway_url)
            said = f"[`penstock up` keeps all this running, its gateway on port {port_of_gateway(None)}]"
            console.print(said, style="dim", markup=False)


def print_answer(gateway_url: str) -> None:
    """Do what the `curl` line does, and print the texts of what comes."""
    body = json.dumps(curl_body()).encode()
    with urllib.request.urlopen(f"{gateway_url}/v1/completions", body, timeout=60.0) as answer:
        for line in answer:
            if line.startswith(b"data: {"):
                chunk = json.loads(line.removeprefix(b"data: "))
                if "error" in chunk:
                    raise PenstockError(chunk["error"]["message"])
                sys.stdout.write(chunk["choices"][0]["text"])
                sys.stdout.flush()
    sys.stdout.write("\n")
