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
from penstock.ingest.errors import ApiError, api_error
from penstock.ingest.openai import ENDPOINTS, Ask, card_of, prompt_of
from penstock.ingest.openai.endpoint import cap_open, request_ids
from penstock.messages import Usage
from penstock.redis.client import backoff_pauses

FIRST_PATIENCE_S, LONGEST_PATIENCE_S = 60.0, 3600.0
"""How long an answer may be silent before it is asked for again, at first and at last."""


NOTHING = Usage()


@dataclass(frozen=True)
class Terms:
    """What holds for all rows of a batch, whatever they say."""

    tenant: str = "default"
    weight: float = 1.0
    deadline: float | None = None
    max_request_tokens: int | None = None


@dataclass(frozen=True)
class Finished:
    """A row that has its answer: `row` is its line in the output, or in the error file."""

    row: bytes
    is_ok: bool
    usage: Usage = NOTHING


async def answer(client: AsyncClient, row: Row, name: str, terms: Terms) -> Finished:
    """A row's answer. `name` is unique to the row and always the same: asked again, it is the same request.

    An outage of the bus or of Redis is waited for. Raises nothing that is the row's own fault.
    """
    request_id = request_id_of(row, name)
    try:
        if row.body.get("stream"):
            raise ApiError(400, "A batch does not stream.", param="stream", code="unsupported_parameter")
        endpoint = ENDPOINTS[row.url]
        body = endpoint.parse(row.body)
        asks = [on_terms(ask, terms) for ask in endpoint.asks(body, request_id)]
        answers = await together([_result(client, ask) for ask in asks])
        card = card_of(endpoint, body, request_id, tenant=terms.tenant)
        whole = endpoint.whole(card, answers).model_dump(mode="json")
    except DeadlineExceeded:
        return left_out(row, name, "batch_expired")
    except (ApiError, RequestError) as error:
        return refused(row, name, error)
    usage = Usage(
        prompt_tokens=sum(one.usage.prompt_tokens for one in answers),
        completion_tokens=sum(one.usage.completion_tokens for one in answers),
    )
    response = {"status_code": 200, "request_id": request_id, "body": whole}
    return Finished(_line(row, name, response, None), is_ok=True, usage=usage)


async def cancel(client: AsyncClient, row: Row, name: str) -> None:
    """Tell the workers that nobody waits for a row's answer. Raises `ApiError` or `BusUnavailable`."""
    body = ENDPOINTS[row.url].parse(row.body)
    for request_id in request_ids(request_id_of(row, name), body.num_choices):
        await client.cancel(request_id)


def request_id_of(row: Row, name: str) -> str:
    """The id of a row's answer; also of its request, and of several the beginning."""
    return f"{ENDPOINTS[row.url].prefix}{name}"


def refused(row: Row, name: str, error: ApiError | RequestError) -> Finished:
    """The row as it is told to its maker when its own request was wrong or failed."""
    told = api_error(error, prompt_of(row.url))
    body = {"error": told.body.model_dump()["error"]}
    response = {"status_code": told.status, "request_id": request_id_of(row, name), "body": body}
    return Finished(_line(row, name, response, None), is_ok=False)


_REASONS = {
    "batch_expired": "This request could not be executed before the completion window expired.",
    "batch_cancelled": "The batch was cancelled before this request was executed.",
}


def left_out(row: Row, name: str, code: str) -> Finished:
    """The row of a request that the end of its batch came before."""
    return Finished(_line(row, name, None, {"code": code, "message": _REASONS[code]}), is_ok=False)


def _line(row: Row, name: str, response: Mapping[str, Any] | None, error: Mapping[str, Any] | None) -> bytes:
    said = {"id": f"batch_req_{name}", "custom_id": row.custom_id, "response": response, "error": error}
    return json.dumps(said).encode()


def on_terms(ask: Ask, terms: Terms) -> Ask:
    """Return a row's request on its batch's terms. Raises `ApiError` 403 for a limit above the tenant's."""
    cap_open([ask], terms.max_request_tokens)
    if terms.max_request_tokens is not None and ask["max_tokens"] > terms.max_request_tokens:
        message = f"One request may ask for {terms.max_request_tokens:,} tokens."
        raise ApiError(403, message, param="max_tokens", code="max_tokens_exceeded")
    fixed = Ask(tenant=terms.tenant, weight=terms.weight, klass="batch")
    return Ask({**ask, **fixed, **({} if terms.deadline is None else {"deadline": terms.deadline})})


async def _result(client: AsyncClient, ask: Ask) -> Answer:
    """Ask, and wait for the answer for as long as it takes.

    What is silent for long is asked again under its id, less and less often: if it only waits in the queue that costs a
    message, and if Redis lost it with all it held it is answered after all. So is what had its answer so long ago
    that its log is over.
    """
    patience_s = FIRST_PATIENCE_S
    while True:
        await _submit(client, ask)
        try:
            return await client.result(str(ask["id"]), timeout_s=patience_s)
        except (StreamExpired, StreamDiverged):
            continue
        except (StreamTimeout, BusUnavailable):
            patience_s = min(2 * patience_s, LONGEST_PATIENCE_S)


async def _submit(client: AsyncClient, ask: Ask) -> None:
    for pause_s in backoff_pauses():
        try:
            await client.submit(**ask)
            return
        except BusUnavailable:
            await asyncio.sleep(pause_s)


async def together(readings: Sequence[Coroutine[Any, Any, Answer]]) -> list[Answer]:
    """All answers; the first error ends the reading of the others."""
    tasks = [asyncio.create_task(reading) for reading in readings]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
