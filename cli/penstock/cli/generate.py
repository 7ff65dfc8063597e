"""`penstock generate`: send one prompt and print its tokens as they arrive."""

import contextlib
import os
import shlex
import sys
import threading
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import redis
import typer
from rich.console import Console

from penstock.bus.connect import connect_bus
from penstock.cli.error_lines import explain_error
from penstock.client.core import Event
from penstock.client.sync import Client
from penstock.config.addresses import Addresses
from penstock.config.settings import BusSettings, TraceSettings, load_settings
from penstock.config.sources import is_secret, variable_name
from penstock.errors import PenstockError
from penstock.grammar.spec import make_schema_spec
from penstock.messages import TokenEvent
from penstock.names import PriorityClass
from penstock.ops.lag import LagWatch, PipelineLag
from penstock.ops.status import assess_health, read_worker_status
from penstock.redis.client import REDIS_TIMEOUT_S
from penstock.redis.urls import hide_passwords
from penstock.telemetry.process import record_spans

SILENCE_BEFORE_REASONS_S = 2.0
"""After this long without an event the reasons for the wait are printed."""


def generate(
    prompt: Annotated[str, typer.Argument(help="The prompt; - reads it from standard input.")],
    max_tokens: Annotated[int, typer.Option(help="Tokens to generate at most.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="0 is off.")] = 0,
    top_p: Annotated[float, typer.Option(help="1 is off.")] = 1.0,
    seed: Annotated[int | None, typer.Option(help="Same seed, same tokens.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="End before this text; may be given several times.")] = None,
    json_schema: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, help="The answer follows the JSON schema in this file."),
    ] = None,
    chat: Annotated[bool, typer.Option(help="Send the prompt as a user's chat message.")] = False,
    picture: Annotated[
        list[Path] | None,
        typer.Option(exists=True, dir_okay=False, help="Ask in a chat about this picture; may be given several times."),
    ] = None,
    batch: Annotated[bool, typer.Option(help="Class batch instead of interactive.")] = False,
    request_id: Annotated[
        str | None, typer.Option("--id", help="The request's id; one that was used before joins it.")
    ] = None,
    resume: Annotated[
        str | None, typer.Option(help="Read on after this event id, '' from the beginning; needs --id, sends nothing.")
    ] = None,
    timeout: Annotated[float, typer.Option(help="Seconds to wait for the next token.")] = 60.0,
) -> None:
    """Send a prompt through the pipeline and print the answer as it comes."""
    if resume is not None and request_id is None:
        raise typer.BadParameter("--resume needs --id")
    request_id = request_id or uuid.uuid4().hex
    priority_class: PriorityClass = "batch" if batch else "interactive"
    addresses, notes = load_settings(Addresses), Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
    with contextlib.ExitStack() as stack:
        stack.enter_context(record_spans("penstock-client", load_settings(TraceSettings)))
        client = stack.enter_context(Client(addresses))
        text = read_as_utf8(sys.stdin.read() if prompt == "-" and resume is None else prompt)
        schema = json_schema.read_text("utf-8", "replace") if json_schema is not None else None
        begun_s = time.perf_counter()
        position = StreamPosition(request_id, resume or None)
        stack.enter_context(explain_waiting(position, addresses, priority_class, notes))
        if resume is None:
            content = [*map(client.put_picture, picture), text] if picture else text
            client.submit(
                prompt=None if chat or picture else text,
                messages=[{"role": "user", "content": content}] if chat or picture else None,
                id=request_id,
                priority_class=priority_class,
                max_tokens=max_tokens,
                temperature=temperature,
                top_k=top_k,
                top_p=top_p,
                seed=seed,
                stop=[read_as_utf8(one) for one in stop or []],
                grammar=None if schema is None else make_schema_spec(schema, str(json_schema)),
            )
        try:
            print_stream(position.read_events(client, timeout), begun_s, notes=notes)
        except KeyboardInterrupt:
            line = f"penstock generate - --id {request_id} --resume {shlex.quote(position.last_id or '')}"
            notes.print(f"\nleft; read on with: {format_shell_command(addresses, line)}")
            raise typer.Exit(130) from None


def read_as_utf8(text: str) -> str:
    """Return what was typed as UTF-8 where the locale has no letters for it, so that Python kept its bytes."""
    is_kept = any("\udc80" <= letter <= "\udcff" for letter in text)
    return os.fsencode(text).decode("utf-8", "replace") if is_kept else text


class StreamPosition:
    """How far a stream was read: the id of the last event that was printed."""

    def __init__(self, request_id: str, last_id: str | None) -> None:
        self.request_id, self.last_id = request_id, last_id
        self.has_begun = threading.Event()
        """Set when the first event came, and when the reader leaves."""

    def read_events(self, client: Client, timeout_s: float) -> Iterator[Event]:
        """Yield the events after the last one that was read."""
        for event in client.stream(self.request_id, after=self.last_id, timeout_s=timeout_s):
            self.has_begun.set()
            yield event
            self.last_id = event.id if isinstance(event, TokenEvent) else self.last_id


@contextlib.contextmanager
def explain_waiting(
    position: StreamPosition, addresses: Addresses, priority_class: PriorityClass, notes: Console
) -> Iterator[None]:
    """Print why a request waits, if nothing has come after two seconds."""

    def print_reasons() -> None:
        if position.has_begun.wait(SILENCE_BEFORE_REASONS_S):
            return
        reasons = find_wait_reasons(addresses, priority_class)
        if not position.has_begun.is_set():
            notes.print("\n".join(f"waiting: {reason}" for reason in reasons))

    threading.Thread(target=print_reasons, name="waiting", daemon=True).start()
    try:
        yield
    finally:
        position.has_begun.set()


def find_wait_reasons(addresses: Addresses, priority_class: PriorityClass) -> list[str]:
    """Return why a request may have to wait, from what servers and workers report now."""
    try:
        bus_settings = load_settings(BusSettings)
        connect_bus(addresses, bus_settings).check_connection(REDIS_TIMEOUT_S)
        workers = read_worker_status(addresses)
        if other := describe_bus_mismatch(workers, addresses):
            return [other]
        if not workers:
            where = f"pipeline {addresses.pipeline!r} at {hide_passwords(addresses.stream_url)}"
            return [f"there is no worker of {where}: see PENSTOCK_PIPELINE and PENSTOCK_STREAM_URL"]
        if reasons := assess_health(workers).reasons:
            return list(reasons)
        with contextlib.closing(LagWatch(addresses, bus_settings)) as watch:
            return [describe_queue(watch.read_latest(), priority_class)]
    except (redis.RedisError, PenstockError) as error:
        return [explain_error(error, addresses) or ""]


def describe_bus_mismatch(workers: Iterable[Mapping[str, Any]], addresses: Addresses) -> str:
    """Return where the workers read requests and what to set, if this command sends them elsewhere; else empty.

    Brokers may have several names, so between two Kafka addresses a mismatch is only possible.
    """
    read_from = {worker["kafka"] for worker in workers if "kafka" in worker}  # known once the model is loaded
    if not read_from or addresses.kafka in read_from:
        return ""
    first = min(read_from)
    theirs, ours = (f"Kafka at {kafka}" if kafka else "Redis Streams" for kafka in (first, addresses.kafka))
    advice = f"set PENSTOCK_KAFKA={first}" if first else "unset PENSTOCK_KAFKA"
    unless = ", unless these are the same brokers" if first and addresses.kafka else ""
    return f"the workers of {addresses.pipeline!r} read from {theirs}, this command sends to {ours}: {advice}{unless}"


def describe_queue(lag: PipelineLag, priority_class: PriorityClass) -> str:
    """Return how many requests are before a request that waits, and about how long that takes."""
    waits, wait_s = (
        sum(stage[priority_class].messages for stage in lag.stages.values()),
        lag.estimated_wait_s(priority_class),
    )
    about = "" if wait_s is None else f"; a new one would wait for about {wait_s:.0f} s"
    return f"{waits} requests of class {priority_class} are queued or worked on{about}"


def format_shell_command(addresses: Addresses, command: str) -> str:
    """Return a command for a shell without settings: with the variables of all addresses that are not the default.

    *** stands for a password.
    """
    words = []
    for name in ("pipeline", "kafka", "stream_url"):
        value = getattr(addresses, name)
        if value != Addresses.model_fields[name].default:
            text = hide_passwords(value) if is_secret(Addresses, name) else value
            words.append(f"{variable_name(Addresses, name)}={shlex.quote(text)}")
    return " ".join([*words, command])


def print_stream(events: Iterable[Event], begun_s: float, *, notes: Console) -> list[float]:
    """Print a stream's text as it arrives, then its timing to `notes`. Raises the request's error.

    Returns the time of each token, by `time.perf_counter`.
    """
    times: list[float] = []
    for event in events:
        sys.stdout.write(event.text)
        sys.stdout.flush()
        if isinstance(event, TokenEvent):
            times.append(time.perf_counter())
    sys.stdout.write("\n")
    sys.stdout.flush()
    if times:
        notes.print(format_summary(begun_s, times), style="dim", highlight=False, markup=False)
    return times


def format_summary(begun_s: float, times: list[float]) -> str:
    """Return a line with the time to first token and the tokens/s of one stream."""
    rate = (
        f", {(len(times) - 1) / (times[-1] - times[0]):.0f} tokens/s" if len(times) > 1 and times[-1] > times[0] else ""
    )
    return f"[{len(times)} tokens, first after {(times[0] - begun_s) * 1000:.0f} ms{rate}]"
