"""`penstock batch run`: a file of requests in, a file of answers out."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from penstock.client.aio import AsyncClient
from penstock.config.addresses import Addresses
from penstock.config.settings import BusSettings, GatewaySettings, load_settings
from penstock.errors import BusUnavailable
from penstock.grammar.checker import GrammarChecker
from penstock.grammar.loosen import LoosenedGrammar
from penstock.ingest.batch.answer import ModelPipeline
from penstock.ingest.batch.journal import Journal, answer_batch_file, check_batch_file
from penstock.ingest.batch.lines import FinishedRow
from penstock.ingest.models import ServedModels
from penstock.messages import GrammarSpec
from penstock.ops.status import check_health
from penstock.redis.client import async_redis_client

app = typer.Typer(help="Send many requests from a file.", no_args_is_help=True)
EXIT_INTERRUPTED = 130


@app.callback()
def add_group() -> None:
    """Send many requests from a file."""


@app.command("run")
def run_batch(
    source: Annotated[Path, typer.Argument(metavar="INPUT", exists=True, dir_okay=False, help="OpenAI's batch lines.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Where answers go, in the order they are finished.")],
    errors: Annotated[
        Path | None, typer.Option(help="Where rows go that failed. By default beside the output, ….errors.jsonl.")
    ] = None,
) -> None:
    """Send all rows of INPUT through the pipeline, as class batch.

    The same command goes on where it was after Ctrl-C or a crash, and repeats no finished row; a journal beside the
    output says which these are. Exits with 1 if rows failed.
    """
    logging.getLogger().setLevel(logging.WARNING)
    errors = errors or output.with_name(f"{output.stem}.errors.jsonl")
    notes = Console(stderr=True)
    try:
        total, num_failed = asyncio.run(_send_rows(source, output, errors, notes))
    except KeyboardInterrupt:
        notes.print("stopped; the same command goes on from here")
        raise typer.Exit(EXIT_INTERRUPTED) from None
    notes.print(f"{total - num_failed:,} answers in {output}", highlight=False)
    if num_failed:
        notes.print(f"{num_failed:,} failed: {errors}", highlight=False)
        raise typer.Exit(1)


async def _send_rows(source: Path, output: Path, errors: Path, notes: Console) -> tuple[int, int]:
    """Send the rows that are not finished. Returns the number of rows, and how many failed."""
    total, digest = await check_batch_file(source)
    addresses, takes_ids = load_settings(Addresses), load_settings(GatewaySettings).takes_token_ids
    with Journal(output, errors, digest) as journal:
        if journal.finished_rows:
            notes.print(f"{len(journal.finished_rows):,} of {total:,} rows are finished already", highlight=False)
        for reason in check_health(addresses, load_settings(BusSettings)).reasons:
            notes.print(f"rows wait: {reason}", highlight=False, markup=False)
        checker = GrammarChecker()
        async with AsyncClient(addresses) as client, async_redis_client(addresses.first_url) as redis:
            models = ServedModels(redis, addresses.pipeline)

            async def loosen_grammar(spec: GrammarSpec, names: frozenset[str]) -> LoosenedGrammar:
                return await asyncio.to_thread(checker.loosen_grammar, spec, names)

            async def find_pipeline(_: str) -> ModelPipeline:
                found = await _find_pipeline(client, models, addresses.pipeline)
                return found._replace(loosen_grammar=loosen_grammar, takes_token_ids=takes_ids)

            try:
                with _show_progress(notes, total, len(journal.finished_rows), journal.num_failed) as meter:
                    await answer_batch_file(find_pipeline, source, journal, meter.count_finished)
            finally:
                await models.close()
                checker.close()
        return total, journal.num_failed


async def _find_pipeline(client: AsyncClient, models: ServedModels, name: str) -> ModelPipeline:
    """Return the pipeline, whose workers refuse a row for another model. Raises `BusUnavailable` until there is one."""
    served = next((one for one in await models.list_models() if one.pipeline == name), None)
    if served is None:
        raise BusUnavailable("no worker is ready yet")
    return ModelPipeline(client, served.response_template)


class _ProgressMeter:
    """The progress bar and its numbers: rows finished and failed, output tokens per second."""

    def __init__(self, progress: Progress, total: int, done: int, failed: int) -> None:
        self._progress, self._num_failed, self._num_tokens, self._begun_s = progress, failed, 0, time.monotonic()
        self._task = progress.add_task("rows", total=total, completed=done, failed=failed, rate=0.0)

    def count_finished(self, finished: FinishedRow) -> None:
        """Show one more finished row."""
        self._num_failed += not finished.is_ok
        self._num_tokens += finished.usage.completion_tokens
        rate = self._num_tokens / (time.monotonic() - self._begun_s)
        self._progress.update(self._task, advance=1, failed=self._num_failed, rate=rate)


@contextlib.contextmanager
def _show_progress(notes: Console, total: int, done: int, failed: int) -> Iterator[_ProgressMeter]:
    """Show a progress bar while the context lasts."""
    columns = (
        MofNCompleteColumn(), BarColumn(), TextColumn("{task.fields[failed]} failed"),
        TextColumn("{task.fields[rate]:,.0f} tokens/s"), TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=notes) as progress:
        yield _ProgressMeter(progress, total, done, failed)
