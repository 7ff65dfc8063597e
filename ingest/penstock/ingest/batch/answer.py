"""Answers the rows of a batch, for the gateway and for `penstock batch run`.

    1  ask      the rows that are not finished, a bounded number at a time, in class `batch`; request ids are made of
                the batch and the line. They are asked in the order of `_read_rows`, the same each time: windows of the
                file, in each of which rows whose prompts begin alike follow one another
    2  buffer   each answer, or error, as a line of the output or of the error file
    3  write    the lines in groups: when there are many, once in a while, and when this ends, however it does

A crash before 3 costs the rows that were asked and are not yet written: they are asked again under their ids, which
joins requests that run, or ended within the hour that a stream is kept, and generates older ones again. There are at
most `MAX_GROUP_ROWS` of them and those that were under way.

The differences are data: where the lines come from and where they are written (a gateway's object store, or files of
this machine with a journal), and which pipeline answers a row.

A row takes two slots: one of its batch, which bounds memory, and one of the pipeline that answers it, which bounds
what all batches of a process ask of that. So a pipeline that is slow, or has no workers, delays its own rows alone.
"""

import asyncio
import json
import logging
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple, TypeVar

from redis.exceptions import RedisError

from penstock.client.aio import AsyncClient
from penstock.client.core import Answer
from penstock.errors import (
    BusUnavailable,
    DeadlineExceeded,
    InternalError,
    PenstockError,
    RequestError,
    RequestLost,
    StorageUnavailable,
    StreamDiverged,
    StreamExpired,
    StreamTimeout,
    is_failure,
)
from penstock.grammar.loosen import LoosenedGrammar
from penstock.ingest.batch.lines import (
    CHUNK_BYTES,
    NO_USAGE,
    BatchRow,
    FinishedRow,
    LentRow,
    RowTerms,
    parse_row,
    split_lines,
)
from penstock.ingest.endpoints import find_prompt_field
from penstock.ingest.errors import ApiError, to_api_error, unknown_model_error
from penstock.ingest.openai import ENDPOINTS, ApiEndpoint, SubmitArgs, make_stream_meta
from penstock.ingest.openai.endpoint import B, cap_open_answers, make_request_ids, use_response_template
from penstock.ingest.openai.picture_parts import list_pictures
from penstock.ingest.openai.texts import check_token_ids
from penstock.ingest.openai.tokens import sum_usage
from penstock.ingest.regions.lending import Lender
from penstock.messages import GrammarSpec, Usage
from penstock.redis.client import backoff_pauses

log = logging.getLogger(__name__)
T = TypeVar("T")

MIN_ANSWER_TIMEOUT_S, MAX_ANSWER_TIMEOUT_S = 60.0, 3600.0
"""How long to wait for the next token of an answer before it is submitted again: the first time, and at most."""
MODEL_CHECK_S = 1.0
"""How often to look for workers that serve a model, while there are none."""
MAX_GROUP_ROWS, MAX_GROUP_BYTES = 500, CHUNK_BYTES
"""Finished rows are written at the latest when there are so many, or so many bytes."""
MAX_WINDOW_ROWS, MAX_WINDOW_BYTES = 2000, 4 * CHUNK_BYTES
"""Rows are sorted by their prompts within so many of a file, or so many bytes: they are in memory."""
PROMPT_FIELDS = ("model", "tools", "instructions", "messages", "prompt", "query", "input")
"""What the tokens of a prompt are made of, in the order in which most templates write it."""
NOT_IN_BATCHES = ("stream", "background", "previous_response_id")
"""A batch neither streams its answers nor keeps them as responses."""


StorePictures = Callable[[str, Sequence[SubmitArgs]], Awaitable[list[SubmitArgs]]]


class ModelPipeline(NamedTuple):
    """The pipeline that serves a model."""

    client: AsyncClient
    response_template: dict[str, Any] | None = None
    """How calls and reasoning are told from the text of its answers; None: they cannot be."""
    loosen_grammar: Callable[[GrammarSpec, frozenset[str]], Awaitable[LoosenedGrammar]] | None = None
    """Leaves out of the schemas of tools what cannot be enforced; None: workers refuse what cannot be."""
    store_pictures: StorePictures | None = None
    """Returns a tenant's requests with their pictures read and stored; None: the model does not see."""
    takes_token_ids: bool = False
    """Whether token ids in place of texts are the model's own (`PENSTOCK_GATEWAY_EMBED_TOKEN_IDS`)."""


FindPipeline = Callable[[str], Awaitable[ModelPipeline]]
"""Returns the pipeline that serves a model. Raises `ApiError` or `BusUnavailable` while no worker serves it."""


@dataclass(frozen=True)
class BatchJob(RowTerms):
    """A batch, as far as its rows are concerned."""

    urls: tuple[str, ...]
    """The endpoints that its rows may name."""
    read_input: Callable[[], AsyncIterator[bytes]]
    """Yields the bytes of its lines, from the beginning."""
    flush_interval_s: float
    """How long a finished row may wait until it is written."""


class Pipelines:
    """The pipelines that answer rows, and how many rows are asked at once."""

    def __init__(self, find_pipeline: FindPipeline, max_rows: int, lender: Lender | None = None) -> None:
        """Let each batch, and all batches of this process together at each pipeline, have `max_rows` under way; as many
        more of a batch in each other region that `lender` knows.
        """
        self.find_pipeline, self.max_rows, self.lender = find_pipeline, max_rows, lender
        self.max_open_rows = max_rows * (1 if lender is None else lender.num_regions)
        self.row_slots = defaultdict[AsyncClient, asyncio.Semaphore](lambda: asyncio.Semaphore(max_rows))
        """How many more rows this process may ask of each pipeline."""

    async def take_slot(self, client: AsyncClient, lent: LentRow) -> FinishedRow | None:
        """Take one of a pipeline's slots for a row, or return the row as another region has answered it."""
        if self.lender is not None:
            return await self.lender.answer_row(lent, self.row_slots[client])
        await self.row_slots[client].acquire()
        return None


class BatchRun:
    """The answering of one batch's rows by this process."""

    def __init__(
        self,
        batch: BatchJob,
        pipelines: Pipelines,
        write_rows: Callable[[Sequence[FinishedRow]], Awaitable[None]],
        on_finished: Callable[[FinishedRow], None],
    ) -> None:
        """Write rows with `write_rows`, one group at a time; `on_finished` hears of each before it is written."""
        self._batch, self._pipelines, self._write_rows, self._on_finished = batch, pipelines, write_rows, on_finished
        self._rows = RowAnswers(batch, pipelines)
        self._unwritten: list[FinishedRow] = []
        self._num_unwritten_bytes = 0
        self._write_lock = asyncio.Lock()

    async def answer_rows(self, finished_rows: Set[int]) -> None:
        """Answer all rows but those whose numbers are in `finished_rows`. However this ends, finished rows are written.

        Raises `InvalidLine`, and what `write_rows` and reading the input raise.
        """
        row_slots = asyncio.Semaphore(self._pipelines.max_open_rows)
        try:
            async with asyncio.TaskGroup() as writing:
                flushing = writing.create_task(self._flush_forever())
                async with asyncio.TaskGroup() as answering:
                    async for row in self._read_rows():
                        if row.number not in finished_rows:
                            await row_slots.acquire()
                            task = answering.create_task(self._finish_row(row))
                            task.add_done_callback(lambda _: row_slots.release())
                flushing.cancel()
        except ExceptionGroup as group:
            raise _find_first_error(group) from group
        finally:
            await self.flush_rows()

    async def skip_rows(self, finished_rows: Set[int], code: str) -> None:
        """Finish all rows but `finished_rows` with an error line, because their batch has ended before.

        Rows are asked in the order of `_read_rows`, so only the first of them may be under way and are cancelled.
        """
        num_asked = self._pipelines.max_open_rows
        async for row in self._read_rows():
            if row.number not in finished_rows:
                if num_asked > 0:
                    num_asked -= 1
                    with suppress(ApiError, BusUnavailable):
                        await self._rows.cancel_row(row)
                await self._add_row(self._rows.make_skipped_row(row, code))
        await self.flush_rows()

    async def flush_rows(self) -> None:
        """Write the finished rows that wait. They are kept if that fails. Cancelling this does not end the writing."""
        await asyncio.shield(asyncio.create_task(self._write_waiting_rows()))

    async def _write_waiting_rows(self) -> None:
        async with self._write_lock:
            group, self._unwritten, self._num_unwritten_bytes = self._unwritten, [], 0
            if group:
                try:
                    await self._write_rows(group)
                except BaseException:
                    self._unwritten = group + self._unwritten
                    self._num_unwritten_bytes += sum(len(one.line) for one in group)
                    raise

    async def _flush_forever(self) -> None:
        while True:
            await asyncio.sleep(self._batch.flush_interval_s)
            await self.flush_rows()

    async def _finish_row(self, row: BatchRow) -> None:
        finished = await self._rows.answer_row(row)
        self._on_finished(finished)
        await self._add_row(finished)

    async def _add_row(self, finished: FinishedRow) -> None:
        self._unwritten.append(finished)
        self._num_unwritten_bytes += len(finished.line)
        if len(self._unwritten) >= MAX_GROUP_ROWS or self._num_unwritten_bytes >= MAX_GROUP_BYTES:
            await self.flush_rows()

    async def _read_rows(self) -> AsyncIterator[BatchRow]:
        """Yield all rows, window by window; those of a window in the order of their prompts, so that a worker still has
        the KV of what a prompt shares with the one before.

        The order follows from the file alone: a run that goes on after a crash yields the same.
        """
        window, num_bytes = list[tuple[str, BatchRow]](), 0
        async for number, line in split_lines(self._batch.read_input()):
            row = parse_row(number, line, self._batch.urls)
            window.append((make_prompt_key(row.body), row))
            num_bytes += len(line)
            if len(window) >= MAX_WINDOW_ROWS or num_bytes >= MAX_WINDOW_BYTES:
                for _, one in sorted(window, key=itemgetter(0)):
                    yield one
                window, num_bytes = [], 0
        for _, one in sorted(window, key=itemgetter(0)):
            yield one


class RowAnswers:
    """Answers single rows of a batch."""

    def __init__(self, terms: RowTerms, pipelines: Pipelines) -> None:
        self._terms, self._pipelines = terms, pipelines

    async def answer_row(self, row: BatchRow) -> FinishedRow:
        """Return a row's answer. Errors of the row itself are returned as its line; outages are waited for."""
        request_id = self._request_id(row)
        try:
            for param in NOT_IN_BATCHES:
                if row.body.get(param):
                    message = f"A line of a batch cannot have '{param}'."
                    raise ApiError(400, message, param=param, code="unsupported_parameter")
            endpoint = ENDPOINTS[row.url]
            body = endpoint.parse_body(row.body)
            requests = [apply_terms(args, self._terms) for args in endpoint.make_requests(body, request_id, sees=True)]
            client, template, loosen, store, takes_ids = await self._wait_for_pipeline(body.model)
            check_token_ids(requests, takes_ids=takes_ids)
            form = use_response_template(endpoint, body, requests, template)
            if form.loose_names and loosen is not None and (grammar := requests[0].get("grammar")) is not None:
                held = await loosen(grammar, form.loose_names)
                for args in requests:
                    args["grammar"] = held.spec
            if (finished := await self._pipelines.take_slot(client, LentRow(self._terms, row))) is not None:
                return finished
            try:
                requests = await self._store_pictures(endpoint, body, store, requests)
                answers = await gather_answers([_wait_for_answer(client, args, self._terms) for args in requests])
            finally:
                self._pipelines.row_slots[client].release()
            tenant = self._terms.tenant
            meta = make_stream_meta(endpoint, body, request_id, tenant=tenant, form=form)
            answer = endpoint.make_answer(meta, answers).model_dump(mode="json")
        except DeadlineExceeded:
            return self.make_skipped_row(row, "batch_expired")
        except (ApiError, RequestError) as error:
            return self._make_error_row(row, error)
        except BaseException as bug:  # this row's, not the whole batch's, which would be tried again for ever
            if not is_failure(bug) or isinstance(bug, (PenstockError, RedisError, OSError)):
                raise
            log.exception("answering line %d of %s failed", row.number, self._terms.name)
            return self._make_error_row(row, InternalError("internal error"))
        response = {"status_code": 200, "request_id": request_id, "body": answer}
        return self._make_row(row, response, None, sum_usage(one.usage for one in answers))

    async def _store_pictures(
        self, endpoint: ApiEndpoint[B], body: B, store: StorePictures | None, requests: list[SubmitArgs]
    ) -> list[SubmitArgs]:
        """Return requests with stored pictures. Raises `ApiError` 400, also where the model does not see."""
        if not list_pictures(requests):
            return requests
        if store is None:
            return endpoint.make_requests(body, str(requests[0]["id"]))  # says which part is no text
        return await _retry_outages(partial(store, self._terms.tenant, requests))

    async def _wait_for_pipeline(self, model: str) -> ModelPipeline:
        """Return the pipeline of a model; wait while no worker serves it.

        Raises `ApiError` 404 for a model that was unknown when the batch was accepted.
        """
        if self._terms.models is not None and model not in self._terms.models:
            raise unknown_model_error(model, (one for one in self._terms.models if not one.startswith("/")))  # no paths
        while True:
            # A 404 says only that this process sees no worker of the model now: they may be starting.
            with suppress(BusUnavailable, ApiError):
                return await self._pipelines.find_pipeline(model)
            await asyncio.sleep(MODEL_CHECK_S)

    async def cancel_row(self, row: BatchRow) -> None:
        """Cancel the requests of a row. Raises `ApiError` or `BusUnavailable`."""
        if self._pipelines.lender is not None:
            await self._pipelines.lender.cancel_row(LentRow(self._terms, row))
        client, request_ids = await self._find_requests(row)
        for request_id in request_ids:
            await client.cancel(request_id)

    async def is_begun(self, row: BatchRow) -> bool:
        """Return whether a worker has begun one of a row's requests. Raises `ApiError` or `BusUnavailable`."""
        client, request_ids = await self._find_requests(row)
        found = [await client.status(request_id) for request_id in request_ids]
        return any(status is not None and status.stage != "new" for status in found)

    async def _find_requests(self, row: BatchRow) -> tuple[AsyncClient, list[str]]:
        body = ENDPOINTS[row.url].parse_body(row.body)
        client, *_ = await self._pipelines.find_pipeline(body.model)
        return client, make_request_ids(self._request_id(row), body.num_choices)

    def _make_error_row(self, row: BatchRow, error: ApiError | RequestError) -> FinishedRow:
        """Return the line of a row whose request was invalid or failed."""
        api_error = to_api_error(error, find_prompt_field(row.url))
        body = {"error": api_error.body.model_dump()["error"]}
        return self._make_row(
            row, {"status_code": api_error.status, "request_id": self._request_id(row), "body": body}, None
        )

    def make_skipped_row(self, row: BatchRow, code: str) -> FinishedRow:
        """Return the line of a row that was not answered before its batch ended."""
        return self._make_row(row, None, {"code": code, "message": _SKIP_MESSAGES[code]})

    def _make_row(
        self,
        row: BatchRow,
        response: Mapping[str, Any] | None,
        error: Mapping[str, Any] | None,
        usage: Usage = NO_USAGE,
    ) -> FinishedRow:
        entry = {"id": f"batch_req_{self._row_name(row)}", "custom_id": row.custom_id}
        line = json.dumps({**entry, "response": response, "error": error}).encode()
        return FinishedRow(row.number, line, is_ok=response is not None and response["status_code"] == 200, usage=usage)

    def _request_id(self, row: BatchRow) -> str:
        """Return the id of a row's answer. It is its request's id too, or the prefix of several."""
        return f"{ENDPOINTS[row.url].id_prefix}{self._row_name(row)}"

    def _row_name(self, row: BatchRow) -> str:
        return f"{self._terms.name}-{row.number}"


def make_prompt_key(body: Mapping[str, Any]) -> str:
    """Return a text by which rows are sorted: the longer the beginning that two have in common, the nearer they are."""
    try:
        return json.dumps([body.get(name) for name in PROMPT_FIELDS])
    except RecursionError:  # such a row fails alone, when it is asked
        return ""


_SKIP_MESSAGES = {
    "batch_expired": "This request could not be executed before the completion window expired.",
    "batch_cancelled": "The batch was cancelled before this request was executed.",
}


def apply_terms(args: SubmitArgs, batch: RowTerms) -> SubmitArgs:
    """Apply a batch's terms to a row's request. Raises `ApiError` 403 for a limit above the tenant's."""
    max_tokens = batch.max_request_tokens
    cap_open_answers([args], max_tokens)
    if max_tokens is not None and args.get("max_tokens", 0) > max_tokens:
        message = f"One request may ask for {max_tokens:,} tokens."
        raise ApiError(403, message, param="max_tokens", code="max_tokens_exceeded")
    fixed = SubmitArgs(tenant=batch.tenant, weight=batch.weight, priority_class="batch")
    return SubmitArgs({**args, **fixed, **({} if batch.deadline is None else {"deadline": batch.deadline})})


async def _wait_for_answer(client: AsyncClient, args: SubmitArgs, batch: RowTerms) -> Answer:
    """Submit a request and wait for its answer, for as long as it takes.

    A request without news is submitted again under its id, at growing intervals. If it only waits in the queue that
    costs one message; if Redis lost all data, it is answered all the same. An answer whose log has expired is
    generated again, under a further id where the first is remembered.
    """
    patience_s, first_id = MIN_ANSWER_TIMEOUT_S, str(args["id"])
    count = 1
    while True:
        while await _retry_outages(partial(client.is_remembered, str(args["id"]))):
            count += 1
            args = SubmitArgs({**args, "id": f"{first_id}.{count}"})
        await _submit_request(client, args, batch)
        try:
            return await client.result(str(args["id"]), timeout_s=patience_s)
        except (StreamExpired, StreamDiverged, RequestLost):
            continue
        except (StreamTimeout, BusUnavailable):
            patience_s = min(2 * patience_s, MAX_ANSWER_TIMEOUT_S)


async def _submit_request(client: AsyncClient, args: SubmitArgs, batch: RowTerms) -> None:
    await _retry_outages(partial(client.submit, key=batch.key, own_topics=batch.regions is not None, **args))


async def _retry_outages(act: Callable[[], Awaitable[T]]) -> T:
    """Return the result of `act`, once the servers that it needs can be reached."""
    pauses = backoff_pauses()
    while True:
        try:
            return await act()
        except (BusUnavailable, StorageUnavailable):
            await asyncio.sleep(next(pauses))


async def gather_answers(readings: Sequence[Coroutine[Any, Any, Answer]]) -> list[Answer]:
    """Return all answers. The first error cancels the reading of the others, and is raised."""
    tasks = [asyncio.create_task(reading) for reading in readings]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


def _find_first_error(group: ExceptionGroup[Exception]) -> Exception:
    """Return the first error in a group, or in a group in it."""
    error: Exception = group
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return error
