"""Answering one row of a batch, by the gateway's runner or from the command line."""

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
"""How long an answer may be silent before it is asked for again, at first and at last."""


NO_USAGE = Usage()


@dataclass(frozen=True)
class BatchTerms:
    """What holds for all rows of a batch, whatever they say."""

    tenant: str = "default"
    weight: float = 1.0
    deadline: float | None = None
    max_request_tokens: int | None = None


@dataclass(frozen=True)
class FinishedRow:
    """A row that has its answer: `row` is its line in the output, or in the error file."""

    line: bytes
    is_ok: bool
    usage: Usage = NO_USAGE


async def answer_row(client: AsyncClient, row: Row, name: str, terms: BatchTerms) -> FinishedRow:
    """A row's answer. `name` is unique to the row and always the same: asked again, it is the same request.

    An outage of the bus or of Redis is waited for. Raises nothing that is the row's own fault.
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
    """Tell the workers that nobody waits for a row's answer. Raises `ApiError` or `BusUnavailable`."""
    body = ENDPOINTS[row.url].parse_body(row.body)
    for request_id in make_request_ids(row_request_id(row, name), body.num_choices):
        await client.cancel(request_id)


def row_request_id(row: Row, name: str) -> str:
    """The id of a row's answer; also of its request, and of several the beginning."""
    return f"{ENDPOINTS[row.url].id_prefix}{name}"


def make_error_row(row: Row, name: str, error: ApiError | RequestError) -> FinishedRow:
    """The row as it is told to its maker when its own request was wrong or failed."""
    api_error = to_api_error(error, find_prompt_field(row.url))
    body = {"error": api_error.body.model_dump()["error"]}
    response = {"status_code": api_error.status, "request_id": row_request_id(row, name), "body": body}
    return FinishedRow(_encode_line(row, name, response, None), is_ok=False)


_SKIP_MESSAGES = {
    "batch_expired": "This request could not be executed before the completion window expired.",
    "batch_cancelled": "The batch was cancelled before this request was executed.",
}


def make_skipped_row(row: Row, name: str, code: str) -> FinishedRow:
    """The row of a request that the end of its batch came before."""
    return FinishedRow(_encode_line(row, name, None, {"code": code, "message": _SKIP_MESSAGES[code]}), is_ok=False)


def _encode_line(row: Row, name: str, response: Mapping[str, Any] | None, error: Mapping[str, Any] | None) -> bytes:
    entry = {"id": f"batch_req_{name}", "custom_id": row.custom_id, "response": response, "error": error}
    return json.dumps(entry).encode()


def apply_terms(args: SubmitArgs, terms: BatchTerms) -> SubmitArgs:
    """Return a row's request on its batch's terms. Raises `ApiError` 403 for a limit above the tenant's."""
    cap_open_answers([args], terms.max_request_tokens)
    if terms.max_request_tokens is not None and args["max_tokens"] > terms.max_request_tokens:
        message = f"One request may ask for {terms.max_request_tokens:,} tokens."
        raise ApiError(403, message, param="max_tokens", code="max_tokens_exceeded")
    fixed = SubmitArgs(tenant=terms.tenant, weight=terms.weight, klass="batch")
    return SubmitArgs({**args, **fixed, **({} if terms.deadline is None else {"deadline": terms.deadline})})


async def _wait_for_answer(client: AsyncClient, args: SubmitArgs) -> Answer:
    """SubmitArgs, and wait for the answer for as long as it takes.

    What is silent for long is asked again under its id, less and less often: if it only waits in the queue that costs a
    message, and if Redis lost it with all it held it is answered after all. So is what had its answer so long ago
    that its log is over.
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
    """All answers; the first error ends the reading of the others."""
    tasks = [asyncio.create_task(reading) for reading in readings]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
