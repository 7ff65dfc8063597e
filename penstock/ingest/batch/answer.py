"""Answers one row of a batch, for the gateway's runner and for the command line."""

import asyncio
import json
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.client.aio import AsyncClient
from penstock.client.core import Answer
from penstock.errors import BusUnavailable, DeadlineExceeded, RequestError, StreamDiverged, StreamExpired, StreamTimeout
from penstock.ingest.batch.lines import Row
from penstock.ingest.errors import ApiError, to_api_error
from penstock.ingest.openai import ENDPOINTS, SubmitArgs, find_prompt_field, make_stream_meta
from penstock.ingest.openai.endpoint import cap_open_answers, make_request_ids
from penstock.messages import Usage
from penstock.redis.client import backoff_pauses

MIN_ANSWER_TIMEOUT_S, MAX_ANSWER_TIMEOUT_S = 60.0, 3600.0
"""How long to wait for the next token of an answer before it is submitted again: the first time, and at most."""


NO_USAGE = Usage()


@dataclass(frozen=True)
class BatchTerms:
    """What applies to all rows of a batch, whatever they ask for."""

    tenant: str = "default"
    weight: float = 1.0
    deadline: float | None = None
    max_request_tokens: int | None = None


@dataclass(frozen=True)
class FinishedRow:
    """A row that is finished; `line` goes to the output if `is_ok`, else to the error file."""

    line: bytes
    is_ok: bool
    usage: Usage = NO_USAGE


async def answer_row(client: AsyncClient, row: Row, name: str, terms: BatchTerms) -> FinishedRow:
    """Return a row's answer. `name` is unique to the row and never changes, so submitting again joins the same request.

    Outages of the bus or of Redis are waited for. Errors of the row itself are returned as its line, not raised.
    """
    request_id = row_request_id(row, name)
    try:
        if row.body.get("stream"):
            raise ApiError(400, "A batch does not stream.", param="stream", code="unsupported_parameter")
        endpoint = ENDPOINTS[row.url]
        body = endpoint.parse_body(row.body)
        requests = [apply_terms(args, terms) for args in endpoint.make_requests(body, request_id)]
        answers = await gather_answers([_wait_for_answer(client, args) for args in requests])
        meta = make_stream_meta(endpoint, body, request_id, tenant=terms.tenant)
        answer = endpoint.make_answer(meta, answers).model_dump(mode="json")
    except DeadlineExceeded:
        return make_skipped_row(row, name, "batch_expired")
    except (ApiError, RequestError) as error:
        return make_error_row(row, name, error)
    usage = Usage(
        prompt_tokens=sum(one.usage.prompt_tokens for one in answers),
        completion_tokens=sum(one.usage.completion_tokens for one in answers),
    )
    response = {"status_code": 200, "request_id": request_id, "body": answer}
    return FinishedRow(_encode_line(row, name, response, None), is_ok=True, usage=usage)


async def cancel_row(client: AsyncClient, row: Row, name: str) -> None:
    """Cancel the requests of a row. Raises `ApiError` or `BusUnavailable`."""
    body = ENDPOINTS[row.url].parse_body(row.body)
    for request_id in make_request_ids(row_request_id(row, name), body.num_choices):
        await client.cancel(request_id)


def row_request_id(row: Row, name: str) -> str:
    """Return the id of a row's answer. It is its request's id too, or the prefix of several."""
    return f"{ENDPOINTS[row.url].id_prefix}{name}"


def make_error_row(row: Row, name: str, error: ApiError | RequestError) -> FinishedRow:
    """Return the line of a row whose request was invalid or failed."""
    api_error = to_api_error(error, find_prompt_field(row.url))
    body = {"error": api_error.body.model_dump()["error"]}
    response = {"status_code": api_error.status, "request_id": row_request_id(row, name), "body": body}
    return FinishedRow(_encode_line(row, name, response, None), is_ok=False)


_SKIP_MESSAGES = {
    "batch_expired": "This request could not be executed before the completion window expired.",
    "batch_cancelled": "The batch was cancelled before this request was executed.",
}


def make_skipped_row(row: Row, name: str, code: str) -> FinishedRow:
    """Return the line of a row that was not answered before its batch ended."""
    return FinishedRow(_encode_line(row, name, None, {"code": code, "message": _SKIP_MESSAGES[code]}), is_ok=False)


def _encode_line(row: Row, name: str, response: Mapping[str, Any] | None, error: Mapping[str, Any] | None) -> bytes:
    entry = {"id": f"batch_req_{name}", "custom_id": row.custom_id, "response": response, "error": error}
    return json.dumps(entry).encode()


def apply_terms(args: SubmitArgs, terms: BatchTerms) -> SubmitArgs:
    """Apply a batch's terms to a row's request. Raises `ApiError` 403 for a limit above the tenant's."""
    cap_open_answers([args], terms.max_request_tokens)
    if terms.max_request_tokens is not None and args["max_tokens"] > terms.max_request_tokens:
        message = f"One request may ask for {terms.max_request_tokens:,} tokens."
        raise ApiError(403, message, param="max_tokens", code="max_tokens_exceeded")
    fixed = SubmitArgs(tenant=terms.tenant, weight=terms.weight, klass="batch")
    return SubmitArgs({**args, **fixed, **({} if terms.deadline is None else {"deadline": terms.deadline})})


async def _wait_for_answer(client: AsyncClient, args: SubmitArgs) -> Answer:
    """Submit a request and wait for its answer, for as long as it takes.

    A request without news is submitted again under its id, at growing intervals. If it only waits in the queue that
    costs one message; if Redis lost all data, it is answered all the same. An answer whose log has expired is
    generated again.
    """
    patience_s = MIN_ANSWER_TIMEOUT_S
    while True:
        await _submit_request(client, args)
        try:
            return await client.result(str(args["id"]), timeout_s=patience_s)
        except (StreamExpired, StreamDiverged):
            continue
        except (StreamTimeout, BusUnavailable):
            patience_s = min(2 * patience_s, MAX_ANSWER_TIMEOUT_S)


async def _submit_request(client: AsyncClient, args: SubmitArgs) -> None:
    for pause_s in backoff_pauses():
        try:
            await client.submit(**args)
            return
        except BusUnavailable:
            await asyncio.sleep(pause_s)


async def gather_answers(readings: Sequence[Coroutine[Any, Any, Answer]]) -> list[Answer]:
    """Return all answers. The first error cancels the reading of the others, and is raised."""
    tasks = [asyncio.create_task(reading) for reading in readings]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
