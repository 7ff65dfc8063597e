"""From a POST to requests in the pipeline.

    1  find     the pipeline that serves its model; what cannot be answered is refused
    2  join     with an `Idempotency-Key`: the request that another POST made is this one
    3  admit    rights, lag, and the tenant's bucket
    4  card     what any gateway must know to stream the answer is written, unless it is there
    5  publish  one request for each choice

A crash after 3 costs the tenant an estimate; after 4, a card of which nothing comes: a POST with the same key finds it,
and publishes what no worker has seen yet. That may publish twice what waits in its topic, which is answered once.
"""

import asyncio
import hashlib
import uuid
from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import Header
from pydantic import BaseModel, BeforeValidator, Field, StringConstraints, WithJsonSchema

from ingest.admission import Ticket
from ingest.gateway.errors import ApiError
from ingest.gateway.state import Gateway
from ingest.openai.body import Body
from ingest.openai.endpoint import Ask, Card, Endpoint, card_of
from ingest.openai.tokens import CHARS_PER_TOKEN
from ingest.shares import BUSY_S
from ingest.tenants import Caller
from penstock.client import make_request
from penstock.messages import Request, RequestId, Usage, now_s
from penstock.names import Pipeline

MAX_WAIT_S = 86400.0


def _seconds(said: object) -> object:
    """`true` is any wait that a free pipeline would not have."""
    return {"true": BUSY_S, "false": None}.get(said.lower(), said) if isinstance(said, str) else said


Wait = Annotated[
    Annotated[float, Field(ge=0, le=MAX_WAIT_S, allow_inf_nan=False)] | None,
    BeforeValidator(_seconds),
    WithJsonSchema({"anyOf": [{"type": "boolean"}, {"type": "number", "minimum": 0, "maximum": MAX_WAIT_S}]}),
]


class Wishes(BaseModel):
    """Headers that say how to answer."""

    idempotency_key: Annotated[str, StringConstraints(min_length=1, max_length=255)] | None = None
    """A POST with the key of an earlier one joins its request."""
    x_session_affinity: RequestId | None = None
    """Requests of one session find the worker that has their KV."""
    x_penstock_reject_if_busy: Wait = None
    """429 at once, if the request would have to wait for longer than so many seconds; `true`: than one."""
    x_penstock_deadline_s: Annotated[float, Field(gt=0, le=7 * 86400, allow_inf_nan=False)] | None = None
    """Seconds from now after which nobody wants the answer."""
    x_penstock_cancel_on_disconnect: bool = False
    """Cancel the request when this connection ends. Otherwise it goes on, and its stream can be read again."""


WishesDep = Annotated[Wishes, Header()]


async def accept(
    gateway: Gateway, caller: Caller, wishes: Wishes, endpoint: Endpoint[Any], body: Body, came_s: float
) -> tuple[Card, Ticket | None]:
    """The card of a POST's request, which is durable now; a ticket if it is new. Raises `ApiError` and our own.

    `came_s` is when the POST came, in seconds since the epoch: its requests' traces begin there.
    """
    served = await gateway.models.find(body.model)
    request_id = endpoint.prefix + _unique(caller.tenant, wishes.idempotency_key)
    card = card_of(endpoint, body, request_id, pipeline=served.pipeline, tenant=caller.tenant)
    asks = endpoint.asks(body, request_id)
    requests = [_request(ask, caller, wishes) for ask in asks]
    earlier = None if wishes.idempotency_key is None else await gateway.cards.find(request_id)
    if earlier is not None:
        return await _join(gateway, earlier, card, requests), None
    ticket = await _admit(gateway, caller, card, requests, wishes)
    found = await gateway.cards.put(card)
    if found is not card:
        await gateway.admission.settle(ticket, Usage())
        return await _join(gateway, found, card, requests), None
    client = gateway.client(card.pipeline)
    await asyncio.gather(*(client.send(request, came_s) for request in requests))
    return card, ticket


def _unique(tenant: str, key: str | None) -> str:
    if key is None:
        return uuid.uuid4().hex
    return hashlib.sha256(f"{tenant}\n{key}".encode()).hexdigest()[:32]


def _request(ask: Ask, caller: Caller, wishes: Wishes) -> Request:
    prompt = ask.pop("prompt", None)
    ask["tenant"], ask["weight"] = caller.tenant, caller.weight
    if wishes.x_session_affinity is not None:
        ask["session"] = wishes.x_session_affinity
    if wishes.x_penstock_deadline_s is not None:
        ask["deadline"] = now_s() + wishes.x_penstock_deadline_s
    return make_request(prompt, ask)


async def _admit(gateway: Gateway, caller: Caller, card: Card, requests: Sequence[Request], wishes: Wishes) -> Ticket:
    max_output = sum(request.sampling.max_tokens for request in requests)
    return await gateway.admission.admit(
        caller,
        Pipeline(card.pipeline),
        requests[0].klass or "interactive",
        sum(map(num_prompt_tokens, requests)) + max_output,
        max_output=max_output,
        most_wait_s=wishes.x_penstock_reject_if_busy,
    )


def num_prompt_tokens(request: Request) -> int:
    """About how many tokens a prompt has."""
    if request.token_ids is not None:
        return len(request.token_ids)
    texts = [request.prompt or "", *(message.content for message in request.messages or ())]
    return sum(map(len, texts)) // CHARS_PER_TOKEN + 1


async def _join(gateway: Gateway, found: Card, card: Card, requests: Sequence[Request]) -> Card:
    if found.body_hash != card.body_hash:
        message = "this Idempotency-Key was used with another body"
        raise ApiError(409, message, code="idempotency_conflict")
    client = gateway.client(found.pipeline)
    for request in requests:
        if await client.status(request.id) is None:
            await client.send(request)
    options = found.options | {"stream_options": card.options.get("stream_options")}
    return found.model_copy(update={"options": options})
