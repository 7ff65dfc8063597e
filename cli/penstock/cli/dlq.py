"""`penstock dlq list | show | requeue`: list and show dead letters, and send them again."""

import contextlib
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, cast

import redis
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from penstock import names
from penstock.bus.connect import connect_bus
from penstock.bus.contract import Bus, Publisher
from penstock.config.addresses import Addresses
from penstock.config.settings import BusSettings, load_settings
from penstock.errors import DeadLetterError
from penstock.messages import drop_schema_prefix
from penstock.names import Pipeline, find_shared_topic
from penstock.ops.dead_letters import DeadLetter, keep_newest, sort_by_age
from penstock.redis.client import redis_client

app = typer.Typer(help="Read and requeue dead letters: requests that nobody could answer.", no_args_is_help=True)

AsJson = Annotated[bool, typer.Option("--json", help="For programs.")]


@app.command("list")
def list_letters(as_json: AsJson = False) -> None:
    """All dead letters, the newest last, and which were asked again."""
    with _open_queue() as queue:
        letters = sort_by_age(queue.read_letters())
        rows = [{**_summarise_letter(letter), "requeued": queue.is_requeued(letter)} for letter in letters]
    if as_json:
        print(json.dumps(rows, indent=1))  # noqa: T201
    elif rows:
        _make_console().print(_build_table(rows))
    else:
        _make_console().print("no dead letters")


@app.command("show")
def show_letters(
    id_: Annotated[str, typer.Argument(metavar="ID", help="As `penstock dlq list` shows it.")],
    as_json: AsJson = False,
) -> None:
    """Show a dead letter: headers, reason, stack and the message; all letters where several have the id."""
    with _open_queue() as queue:
        letters = queue.find_letters(id_)
    if as_json:
        print(json.dumps([_describe_letter(letter) for letter in letters], indent=1))  # noqa: T201
        return
    for letter in letters:
        _print_letter(_make_console(), letter)


@app.command("requeue")
def requeue_letters(
    id_: Annotated[str | None, typer.Argument(metavar="ID", help="As `penstock dlq list` shows it.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="All that were not put back yet.")] = False,
) -> None:
    """Ask again: the message goes back to the topic it was first in, under a new id.

    The old id keeps its one result, the error. order-17 is asked again as order-17.retry-1, after that as
    order-17.retry-2; its stream and its result have that id. A deadline that has passed is left out. Without a seed
    of its own a request may draw other tokens than under its old id. The newest of several
    letters with one id is taken. Exit code 1 if one could not be put back.
    """
    if everything == (id_ is not None):
        raise typer.BadParameter("give an ID or --all, one of them")
    num_failed = 0
    with _open_queue() as queue:
        if id_ is not None:
            chosen = queue.find_letters(id_)[-1:]
        else:
            chosen = [letter for letter in keep_newest(queue.read_letters()) if not queue.is_requeued(letter)]
        for letter in chosen:
            try:
                print(f"{letter.id} is asked again as {queue.requeue_letter(letter)}")  # noqa: T201
            except DeadLetterError as error:
                num_failed += 1
                print(f"penstock: {error}", file=sys.stderr)  # noqa: T201
    if everything:
        print(f"{len(chosen) - num_failed} put back" + (f", {num_failed} cannot be" if num_failed else ""))  # noqa: T201
    raise typer.Exit(1 if num_failed else 0)


@dataclass
class _DeadLetterQueue:
    """The dead-letter topic, and how often each request was put back into its topic."""

    pipeline: Pipeline
    bus: Bus
    publisher: Publisher
    client: "redis.Redis"

    def __post_init__(self) -> None:
        counts = cast("dict[bytes, bytes]", self.client.hgetall(self.pipeline.requeued_key))
        self._retries = {base.decode(): int(count) for base, count in counts.items()}

    def read_letters(self) -> list[DeadLetter]:
        """Return all dead letters, also those of tenants' own topics. Raises `DeadLetterError` without topics."""
        if self.pipeline.dead_letter_topic in self.bus.find_missing_topics():
            raise DeadLetterError(f"the pipeline {self.pipeline.name!r} has no topics yet: penstock topics create")
        dead = self.pipeline.dead_letter_topic
        topics = [dead, *(topic for topic in self.bus.find_own_topics() if find_shared_topic(topic) == dead)]
        return [DeadLetter.from_message(message) for topic in topics for message in self.bus.read_all(topic)]

    def find_letters(self, id_: str) -> list[DeadLetter]:
        """Return the letters of one id, the newest last. Raises `DeadLetterError` if there is none."""
        found = [letter for letter in sort_by_age(self.read_letters()) if letter.id == id_]
        if not found:
            raise DeadLetterError(f"no dead letter has the id {id_!r}: see penstock dlq list")
        return found

    def is_requeued(self, letter: DeadLetter) -> bool:
        """Return whether the letter was put back."""
        return self._retries.get(letter.base_id, 0) > letter.retry_number

    def requeue_letter(self, letter: DeadLetter) -> str:
        """Publish the letter's message again and return its new id. The steps are those of `ops.dead_letters`."""
        number = max(self._retries.get(letter.base_id, 0), letter.retry_number) + 1
        message = letter.build_retry(self.pipeline, number)
        self.publisher.publish([message])  # 1
        self.client.hset(self.pipeline.requeued_key, letter.base_id, str(number))  # 2
        self._retries[letter.base_id] = number
        return str(message.key)


@contextlib.contextmanager
def _open_queue() -> Iterator[_DeadLetterQueue]:
    addresses = load_settings(Addresses)
    pipeline, bus = Pipeline(addresses.pipeline), connect_bus(addresses, load_settings(BusSettings))
    with redis_client(addresses.first_url) as client, contextlib.closing(bus.create_publisher()) as publisher:
        yield _DeadLetterQueue(pipeline, bus, publisher, client)


def _summarise_letter(letter: DeadLetter) -> dict[str, Any]:
    """Return what `list` shows of a letter."""
    attempts = letter.get_header(names.ATTEMPT_HEADER)
    return {
        "id": letter.id,
        "buried": letter.dead_since_s,
        "reason": letter.get_header(names.REASON_HEADER),
        "origin": letter.get_header(names.ORIGIN_HEADER),
        "attempts": int(attempts) if attempts.isascii() and attempts.isdecimal() else None,
    }


def _describe_letter(letter: DeadLetter) -> dict[str, Any]:
    """Return all of a letter, for `show --json`."""
    message = letter.message
    text = message.value.decode(errors="replace")
    return {**_summarise_letter(letter), "key": message.key, "headers": dict(message.headers), "message": text}


def _build_table(rows: list[dict[str, Any]]) -> Table:
    table = Table("id", "when", "reason", "origin", box=None, pad_edge=False)
    table.add_column("attempts", justify="right")
    table.columns[0].overflow = table.columns[3].overflow = "fold"
    for row in rows:
        origin = row["origin"].split(".", 2)[-1]
        attempts = "" if row["attempts"] is None else str(row["attempts"])
        mark = " (asked again)" if row["requeued"] else ""
        reason = row["reason"] if len(row["reason"]) <= 120 else row["reason"][:119] + "…"
        cells = (row["id"] + mark, _format_time(row["buried"]), reason, origin, attempts)
        table.add_row(*map(_escape_unprintable, cells))
    return table


def _print_letter(console: Console, letter: DeadLetter) -> None:
    console.print(Text(letter.id, "bold"))
    lines = Table("", "", box=None, pad_edge=False, show_header=False)
    lines.add_row("dead since", _format_time(letter.dead_since_s))
    for name, text in sorted(letter.message.headers.items()):
        if name not in (names.STACK_HEADER, names.BURIED_HEADER) and not name.startswith(names.CONNECT_PREFIX):
            lines.add_row(name, _escape_unprintable(text))
    console.print(lines)
    if letter.get_header(names.STACK_HEADER):
        console.print(_escape_unprintable("\n" + letter.get_header(names.STACK_HEADER).rstrip()), soft_wrap=True)
    try:
        message = json.dumps(json.loads(drop_schema_prefix(letter.message.value)), indent=1, ensure_ascii=False)
    except (ValueError, RecursionError):
        message = letter.message.value.decode(errors="backslashreplace")
    console.print(_escape_unprintable(f"\n{message}\n"), soft_wrap=True)


def _format_time(seconds: float | None) -> str:
    return "unknown" if seconds is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def _escape_unprintable(text: str) -> Text:
    """Return a text from a message without characters that would move a terminal's cursor."""
    return Text("".join(c if c.isprintable() or c == "\n" else f"\\x{ord(c):02x}" for c in text))


def _make_console() -> Console:
    return Console(highlight=False)
