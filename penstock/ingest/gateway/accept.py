"""From a POST to requests in the pipeline.

    1  find     the pipeline that serves its model; what cannot be answered is refused
    2  join     with an `Idempotency-Key`: the request that another POST made is this one
    3  admit    rights, lag, and the tenant's bucket
    4  make     one request for each choice, on a thread where they are large
    5  card     what any gateway must know to stream the answer is written, unless it is there
    6  publish  one request for each choice
    7  note     with an `Idempotency-Key`, in the card: all of them are durable

A crash after 3 or 4 costs the tenant an estimate; after 5, a card of which nothing comes, and after 6 a card that does
not say so: a POST with the same key finds it, and publishes what no worker has seen yet. That may publish twice what
waits in its topic, which is answered once. Each such POST costs the tenant a request of its bucket.
"""

import asyncio
import uuid
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

from fastapi import Header
from pydantic import BaseModel, BeforeValidator, Field, StringConstraints, WithJsonSchema

from penstock.client.core import make_request
from penstock.errors import PenstockError, RequestTooLarge
from penstock.ingest.admission import Ticket
from penstock.ingest.errors import ApiError
from penstock.ingest.gateway.state import Gateway
from penstock.ingest.openai.body import Body
from penstock.ingest.openai.endpoint import Ask, Card, Endpoint, cap_open, card_of
from penstock.ingest.openai.tokens import CHARS_PER_TOKEN
from penstock.ingest.tenant_shares import BUSY_S
from penstock.ingest.tenants import Caller
from penstock.messages import MAX_REQUEST_BYTES, ChatMessage, Request, RequestId, Usage, now_s
from penstock.names import Pipeline
from penstock.record.claim import body_hash

MAX_WAIT_S = 86400.0
PUBLISHED_S = 60.0
"""A POST that joins an earlier one publishes its requests again, if no worker has seen them for so long."""
LARGE_BYTES = 65_536
"""Requests of more bytes are made on a thread: 8 MB take a fifth of a second."""
BYTES_PER_ID = 6
"""Of a token id in JSON, about."""


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
    key = wishes.idempotency_key
    served = await gateway.models.find(body.model)
    name = uuid.uuid4().hex if key is None else await gateway.cards.name_of(caller.tenant, key)
    card = card_of(endpoint, body, endpoint.prefix + name, pipeline=served.pipeline, tenant=caller.tenant)
    asks = [_wished(ask, caller, wishes) for ask in endpoint.asks(body, card.id)]
    cap_open(asks, caller.max_request_tokens)
    earlier = None if key is None else await gateway.cards.find(card.id)
    if earlier is not None:
        return await _join(gateway, caller, earlier, card, asks), None
    check_size(asks)
    ticket = await _admit(gateway, caller, card, asks, wishes)
    try:
        requests, bodies = await _made(asks)
        card = card.model_copy(update={"bodies": bodies})
        found = await gateway.cards.put(card)
    except PenstockError:
        await gateway.admission.settle(ticket, Usage())
        raise
    if found is not card:
        await gateway.admission.settle(ticket, Usage())
        return await _join(gateway, caller, found, card, asks), None
    await _publish(gateway, card, requests, came_s, is_keyed=key is not None)
    return card, ticket


def _wished(ask: Ask, caller: Caller, wishes: Wishes) -> Ask:
    """Add what the caller and its headers say to a request."""
    ask["tenant"], ask["weight"] = caller.tenant, caller.weight
    if wishes.x_session_affinity is not None:
        ask["session"] = wishes.x_session_affinity
    if wishes.x_penstock_deadline_s is not None:
        ask["deadline"] = now_s() + wishes.x_penstock_deadline_s
    return ask


def check_size(asks: Sequence[Ask]) -> None:
    """Raise `RequestTooLarge` where the prompts of all choices together have more bytes than one request may have."""
    num_bytes = 0
    for ask in asks:
        num_bytes += num_prompt_bytes(ask)
        if len(asks) > 1 and num_bytes > MAX_REQUEST_BYTES:
            raise RequestTooLarge(
                f"the prompts of {len(asks)} choices have more than {MAX_REQUEST_BYTES:,} bytes together: "
                "ask for fewer choices (`n`) or prompts at once"
            )


async def _made(asks: Sequence[Ask]) -> tuple[list[Request], list[str]]:
    """Make the requests, and the hashes of their bodies."""
    if sum(map(num_prompt_bytes, asks)) < LARGE_BYTES:
        return _make(asks)
    return await asyncio.to_thread(_make, asks)


def _make(asks: Sequence[Ask]) -> tuple[list[Request], list[str]]:
    requests = []
    for ask in asks:
        fields = ask.copy()
        prompt = fields.pop("prompt", None)
        requests.append(make_request(prompt, fields))
    return requests, list(map(body_hash, requests))


async def _admit(gateway: Gateway, caller: Caller, card: Card, asks: Sequence[Ask], wishes: Wishes) -> Ticket:
    limited = [ask["max_tokens"] for ask in asks if "fit_context" not in ask]
    return await gateway.admission.admit(
        caller,
        Pipeline(card.pipeline),
        asks[0].get("klass", "interactive"),
        sum(map(num_prompt_tokens, asks)) + sum(limited),
        max_output=sum(ask["max_tokens"] for ask in asks),
        num_open=len(asks) - len(limited),
        most_wait_s=wishes.x_penstock_reject_if_busy,
    )


def num_prompt_tokens(ask: Ask) -> int:
    """About how many tokens a prompt has."""
    token_ids = ask.get("token_ids")
    return len(token_ids) if token_ids is not None else sum(map(len, _texts(ask))) // CHARS_PER_TOKEN + 1


def num_prompt_bytes(ask: Ask) -> int:
    """About how many bytes a prompt has as JSON."""
    token_ids = ask.get("token_ids")
    return len(token_ids) * BYTES_PER_ID if token_ids is not None else sum(len(text.encode()) for text in _texts(ask))


def _texts(ask: Ask) -> Iterator[str]:
    yield ask.get("prompt") or ""
    for message in ask.get("messages") or ():
        yield message.content if isinstance(message, ChatMessage) else message["content"]


async def _join(gateway: Gateway, caller: Caller, found: Card, card: Card, asks: Sequence[Ask]) -> Card:
    """Return the card that was there before; its requests are durable now, if they were not."""
    if found.body_hash != card.body_hash:
        message = "this Idempotency-Key was used with another body"
        raise ApiError(409, message, code="idempotency_conflict")
    await gateway.admission.take_request(caller)
    if now_s() > found.published + PUBLISHED_S:
        client = gateway.client(found.pipeline)
        known = await asyncio.gather(*(client.status(request_id) for request_id in found.request_ids))
        # A wish to cancel makes a record of the stage `new`: no worker has seen the request.
        is_seen = [status is not None and status.stage != "new" for status in known]
        requests, _ = await _made([ask for ask, seen in zip(asks, is_seen, strict=True) if not seen])
        if requests:
            await _publish(gateway, found, requests, None, is_keyed=True)
    options = found.options | {"stream_options": card.options.get("stream_options")}
    return found.model_copy(update={"options": options})


async def _publish(
    gateway: Gateway, card: Card, requests: Sequence[Request], came_s: float | None, *, is_keyed: bool
) -> None:
    client = gateway.client(card.pipeline)
    try:
        await asyncio.gather(*(client.send(request, came_s) for request in requests))
    except PenstockError:
        gateway.cards.let_go(card)
        raise
    if is_keyed:
        await gateway.cards.note_published(card)
