"""`penstock generate`: send one prompt and print its tokens as they arrive."""

import sys
import time
from typing import Annotated

import typer
from rich.console import Console

from penstock import tracing
from penstock.client import Client
from penstock.messages import TokenEvent
from penstock.names import PriorityClass
from penstock.settings import Addresses, TraceSettings, load


def generate(
    prompt: Annotated[str, typer.Argument(help="The prompt; - reads it from standard input.")],
    max_tokens: Annotated[int, typer.Option(help="Tokens to generate at most.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="0 is off.")] = 0,
    top_p: Annotated[float, typer.Option(help="1 is off.")] = 1.0,
    seed: Annotated[int | None, typer.Option(help="Same seed, same tokens.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="End before this text; may be given several times.")] = None,
    chat: Annotated[bool, typer.Option(help="Send the prompt as a user's chat message.")] = False,
    batch: Annotated[bool, typer.Option(help="Class batch instead of interactive.")] = False,
    request_id: Annotated[
        str | None, typer.Option("--id", help="The request's id; one that was used before joins it.")
    ] = None,
    resume: Annotated[str | None, typer.Option(help="Read on after this event id; needs --id, sends nothing.")] = None,
    timeout: Annotated[float, typer.Option(help="Seconds to wait for the next token.")] = 60.0,
) -> None:
    """Send a prompt through the pipeline and print the answer as it comes."""
    text = sys.stdin.read() if prompt == "-" else prompt
    klass: PriorityClass = "batch" if batch else "interactive"
    with tracing.recording("penstock-client", load(TraceSettings)), Client(load(Addresses)) as client:
        begun_s = time.perf_counter()
        if resume is not None and request_id is None:
            raise typer.BadParameter("--resume needs --id")
        if resume is None:
            request_id = client.submit(
                prompt=None if chat else text,
                messages=[{"role": "user", "content": text}] if chat else None,
                id=request_id,
                klass=klass,
                max_tokens=max_tokens,
                temperature=temperature,
                top_k=top_k,
                top_p=top_p,
                seed=seed,
                stop=stop or [],
            )
        print_stream(client, request_id or "", begun_s, timeout, notes=Console(stderr=True), after=resume)


def print_stream(
    client: Client, request_id: str, begun_s: float, timeout_s: float, *, notes: Console, after: str | None = None
) -> list[float]:
    """Print a stream's text as it arrives, then to `notes` what it took. Raises the request's error.

    Returns when each token came, by `time.perf_counter`.
    """
    times: list[float] = []
    last = after
    try:
        for event in client.stream(request_id, after=after, timeout_s=timeout_s):
            sys.stdout.write(event.text)
            sys.stdout.flush()
            if isinstance(event, TokenEvent):
                times.append(time.perf_counter())
                last = event.id
    except KeyboardInterrupt:
        notes.print(
            f"\nleft; read on with: penstock generate - --id {request_id}" + (f" --resume {last}" if last else ""),
            highlight=False,
        )
        raise typer.Exit(130) from None
    sys.stdout.write("\n")
    sys.stdout.flush()
    if times:
        notes.print(summary(begun_s, times), style="dim", highlight=False, markup=False)
    return times


def summary(begun_s: float, times: list[float]) -> str:
    """Time to first token and tokens/s of one stream."""
    rate = (
        f", {(len(times) - 1) / (times[-1] - times[0]):.0f} tokens/s" if len(times) > 1 and times[-1] > times[0] else ""
    )
    return f"[{len(times)} tokens, first after {(times[0] - begun_s) * 1000:.0f} ms{rate}]"
