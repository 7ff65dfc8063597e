"""From a POST to requests in the pipeline.

    1  find     the pipeline that serves the model (`fallback.py`); what cannot be answered is refused. Pictures are
                read, where the model sees
    2  join     with an `Idempotency-Key`: another POST with the same key has made the request already; one whose answer
                is no longer kept, while its id is remembered, is refused
    3  admit    the caller's limits, the lag, and the tenant's bucket
    4  make     a grammar is checked, and pictures are stored; one request for each choice, on a thread if they are
                large
    5  meta     write what any gateway must know to stream the answer, unless it is there; a response that is to be
                kept is marked then (`kept_responses.py`)
    6  publish  one request for each choice
    7  note     that all requests are durable, and where their messages are: in the meta data, with an
                `Idempotency-Key` at once, else when it is renewed

A crash after 3 or 4 costs the tenant an estimate. A crash after 5 or 6 leaves meta data without the note of 7: a
POST with the same key finds it, and publishes the requests that no worker has seen yet. A request
that waits in its topic may then be published twice; it is answered once. Each such POST costs the tenant a request of
its bucket. Whatever fails before 6 was not accepted, so a peer's gateway tries another region.

Where the brokers refuse a request of 6 as too large, the meta data is deleted, so the key is free. Requests of the same
POST that they took are computed and paid for, and keep their ids: a POST with the key gets their answers where it asks
the same in their places, and 409 `id_conflict` where it does not.
"""

import asyncio
import json
import uuid
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, NamedTuple

from fastapi import Header
from pydantic import BaseModel, BeforeValidator, Field, StringConstraints, WithJsonSchema

from penstock.client.aio import AsyncClient
from penstock.errors import (
    AcceptanceUnknown,
    BusUnavailable,
    InvalidRequest,
    PenstockError,
    RequestTooLarge,
    TopicsMissing,
    UnsupportedSchema,
)
from penstock.grammar.tools import TOOLS_PATH
from penstock.ingest.admission import FULL_WAIT_S, Ticket
from penstock.ingest.errors import ApiError
from penstock.ingest.gateway.fallback import choose_pipeline
from penstock.ingest.gateway.pictures import ReadPictures
from penstock.ingest.gateway.state import Gateway
from penstock.ingest.models import ServedModel
from penstock.ingest.openai.body import ModelBody
from penstock.ingest.openai.endpoint import (
    AnswerForm,
    ApiEndpoint,
    EarlierTurns,
    StreamMeta,
    SubmitArgs,
    Task,
    build_request,
    cap_open_answers,
    encode_meta,
    hash_answer_fields,
    make_stream_meta,
    name_loosened,
    use_response_template,
)
from penstock.ingest.openai.texts import TextsEndpoint, check_token_ids
from penstock.ingest.openai.tokens import CHARS_PER_TOKEN
from penstock.ingest.streaming.answers import settle_after_end
from penstock.ingest.tenants import Caller
from penstock.messages import (
    MAX_REQUEST_BYTES,
    ChatMessage,
    EmbedOptions,
    EncodedRequest,
    RequestId,
    Usage,
    encode_request,
    now_s,
)
from penstock.names import Pipeline
from penstock.regions import add_home

MAX_WAIT_S = 86400.0
REPUBLISH_AFTER_S = 60.0
"""A POST that joins an earlier one publishes its requests again if no worker has seen them for this long."""
MIN_THREAD_BYTES = 65_536
"""Larger requests are made on a thread: 8 MB take a fifth of a second."""
MAX_CARD_CHARS = 32_768
"""Larger meta data is not written beside a request: a region that adopts the request answers it, and streams it to
nobody."""
BYTES_PER_TOKEN_ID = 6
"""The mean length of a token id in JSON."""


def _parse_max_wait(value: object) -> object:
    """Return the wait in seconds; `true` means the longest that a pipeline that is not full has."""
    return {"true": FULL_WAIT_S, "false": None}.get(value.lower(), value) if isinstance(value, str) else value


MaxWait = Annotated[
    Annotated[float, Field(ge=0, le=MAX_WAIT_S, allow_inf_nan=False)] | None,
    BeforeValidator(_parse_max_wait),
    WithJsonSchema({"anyOf": [{"type": "boolean"}, {"type": "number", "minimum": 0, "maximum": MAX_WAIT_S}]}),
]


class RequestHeaders(BaseModel):
    """Headers that say how to answer."""

    idempotency_key: Annotated[str, StringConstraints(min_length=1, max_length=255)] | None = None
    """A POST with the key of an earlier one joins its request."""
    x_session_affinity: RequestId | None = None
    """Requests of one session find the worker that has their KV. Comes before what the body says of that."""
    x_penstock_reject_if_busy: MaxWait = None
    """Answer 429 at once if the request would have to wait for more than this many seconds; `true`: more than one."""
    x_penstock_deadline_s: Annotated[float, Field(gt=0, le=7 * 86400, allow_inf_nan=False)] | None = None
    """Seconds from now after which the answer is not wanted any more."""
    x_penstock_cancel_on_disconnect: bool = False
    """Cancel the request when this connection ends. Otherwise it goes on, and its stream can be read again."""


RequestHeadersDep = Annotated[RequestHeaders, Header()]


class Accepted(NamedTuple):
    """A request that is durable."""

    meta: StreamMeta
    ticket: Ticket | None = None
    """Given if it is new."""
    ignored: Sequence[str] = ()
    """What was left out of the schemas of tools, as `penstock-ignored` names it."""


async def accept_request(
    gateway: Gateway,
    caller: Caller,
    headers: RequestHeaders,
    endpoint: ApiEndpoint[Any],
    body: ModelBody,
    arrived_s: float,
    input_items: list[dict[str, Any]] | None = None,
    earlier_turns: EarlierTurns | None = None,
    retain_s: int | None = None,
) -> Accepted:
    """Make a POST's request durable.

    `arrived_s` is when the POST came, in seconds since the epoch: the traces of its requests begin there.
    `input_items` are what a response was asked that is to be kept, `earlier_turns` those before it.
    The KV outlives other KV for `retain_s`. Raises `PenstockError`, which `ApiError` is one of.
    """
    gateway.check_residency(caller)
    key = headers.idempotency_key
    served = await gateway.models.find_model(body.model)
    name = uuid.uuid4().hex if key is None else await gateway.stream_metas.derive_name(caller.tenant, key)
    request_id = add_home(endpoint.id_prefix + name, gateway.settings.region.name)
    chain = None if input_items is None else request_id
    chain = chain if earlier_turns is None else earlier_turns.first_id
    check_task(endpoint, served)
    made = endpoint.make_requests(body, request_id, sees=served.sees)
    pictures = await gateway.pictures.read_pictures(caller.tenant, made)
    earlier = None if key is None else await _find_earlier(gateway, served, request_id, made)
    served = await choose_pipeline(gateway, caller, served, made, earlier, has_pictures=bool(pictures.pictures))
    if isinstance(endpoint, TextsEndpoint):
        endpoint.choose_prompt(body, made, served.card.get("prompts") or ())
        check_token_ids(made, takes_ids=gateway.settings.gateway.takes_token_ids)
    names_chat = headers.x_session_affinity or any(args.get("session") for args in made)
    submit_args = [_complete_args(args, caller, headers, chain, retain_s) for args in made]
    form = use_response_template(endpoint, body, submit_args, served.response_template)
    meta = make_stream_meta(
        endpoint,
        body,
        request_id,
        pipeline=served.pipeline,
        tenant=caller.tenant,
        body_hash="" if key is None else hash_answer_fields(endpoint, body),
        input_items=pictures.shorten_items(input_items),
        earlier=earlier_turns,
        form=form,
    )
    cap_open_answers(submit_args, caller.max_request_tokens)
    check = partial(_check_grammar, gateway, endpoint, body, submit_args, form)
    if earlier is not None:
        return await _join_earlier(gateway, caller, earlier, meta, submit_args, pictures, check)
    size = measure_prompts(submit_args)
    num_tokens = size.num_tokens + len(submit_args) * pictures.count_tokens(served.picture_tokens)
    ticket = await _admit_request(gateway, caller, meta, submit_args, num_tokens, headers)
    try:
        ignored = await check()
        requests = await _make_requests(submit_args, size, pictures)
        is_lost = not (key or names_chat or input_items is not None or meta.options.get("background"))
        bodies = [encoded.body_hash for encoded in requests]
        meta = meta.model_copy(update={"bodies": bodies, "is_lost_unread": is_lost})
        found = await gateway.stream_metas.put(meta)
    except PenstockError:
        await gateway.admission.settle(ticket, Usage())
        raise
    if found is not meta:
        await gateway.admission.settle(ticket, Usage())
        return await _join_earlier(gateway, caller, found, meta, submit_args, pictures, check)
    places = dict[str, str]()
    try:
        await _publish_requests(gateway, caller, meta, requests, places, arrived_s, is_keyed=key is not None)
    except RequestTooLarge:  # the brokers take less than a request may have, and have refused it
        await gateway.stream_metas.delete_meta(meta)
        if places:
            kept = [(one, body) for one, body in zip(meta.request_ids, meta.bodies, strict=True) if one in places]
            # Under another id, as the key may have a new request when these end.
            fields = {"id": uuid.uuid4().hex, "request_ids": [one for one, _ in kept], "bodies": [b for _, b in kept]}
            gateway.run_later(settle_after_end(gateway, meta.model_copy(update=fields), ticket))
        else:
            await gateway.admission.settle(ticket, Usage())
        raise
    return Accepted(meta, ticket, ignored)


_PATHS: Mapping[Task, str] = {
    "generate": "generates text: send chats to /v1/chat/completions",
    "embed": "computes vectors: send texts to /v1/embeddings",
    "score": "scores texts by a query: send both to /v1/rerank",
}
"""What models do, and where they are asked for it."""


def check_task(endpoint: ApiEndpoint[Any], served: ServedModel) -> None:
    """Raise `ApiError` 400 if a model does not do what an endpoint asks of it."""
    if not served.does_task(endpoint.task):
        message = f"The model {served.name!r} {_PATHS[served.task]}. /v1/models lists the 'task' of each model."
        raise ApiError(400, message, param="model", code="wrong_task")


def _complete_args(
    args: SubmitArgs, caller: Caller, headers: RequestHeaders, chain: str | None, retain_s: int | None
) -> SubmitArgs:
    """Add to a request what follows from the caller, the headers, the first response of the chain that it is in, and
    the time for which its KV is to be kept.
    """
    args["tenant"], args["weight"] = caller.tenant, caller.weight
    if retain_s is not None:
        args["retain_s"] = retain_s
    if session := headers.x_session_affinity or args.get("session") or chain:
        args["session"] = session
    if headers.x_penstock_deadline_s is not None:
        args["deadline"] = now_s() + headers.x_penstock_deadline_s
    return args


class PromptSize(NamedTuple):
    """An estimate of how large the prompts of a request's choices are together."""

    num_bytes: int
    """As JSON."""
    num_tokens: int


def measure_prompts(submit_args: Sequence[SubmitArgs]) -> PromptSize:
    """Return the size of all prompts. One that several choices share is read once, and counts for each.

    Raise `RequestTooLarge` if several are larger than one request may be.
    """
    known, num_bytes, num_tokens = dict[int, PromptSize](), 0, 0
    for args in submit_args:
        shared = id(args.get("token_ids") or args.get("messages") or args.get("prompt") or args.get("texts"))
        if shared not in known:
            known[shared] = _measure_prompt(args)
        num_bytes, num_tokens = num_bytes + known[shared].num_bytes, num_tokens + known[shared].num_tokens
        if len(submit_args) > 1 and num_bytes > MAX_REQUEST_BYTES:
            raise RequestTooLarge(
                f"the prompts of {len(submit_args)} choices have more than {MAX_REQUEST_BYTES:,} bytes together: "
                "ask for fewer choices (`n`) or prompts at once"
            )
    return PromptSize(num_bytes, num_tokens)


def _measure_prompt(args: SubmitArgs) -> PromptSize:
    lists = [args.get("token_ids") or (), *(text for text in args.get("texts") or () if not isinstance(text, str))]
    if num_ids := sum(map(len, lists)):
        return PromptSize(num_ids * BYTES_PER_TOKEN_ID, num_ids)
    num_bytes = num_chars = 0
    for text in _prompt_texts(args):
        num_bytes += len(text) if text.isascii() else len(text.encode())
        num_chars += len(text)
    return PromptSize(num_bytes, num_chars // CHARS_PER_TOKEN + 1)


async def _check_grammar(
    gateway: Gateway, endpoint: ApiEndpoint[Any], body: ModelBody, submit_args: Sequence[SubmitArgs], form: AnswerForm
) -> list[str]:
    """Have the answer's grammar checked, and loosened where it may be. Return how what was left out is named.

    Raises `ApiError` 400 if anything else cannot be enforced exactly.
    """
    if (spec := submit_args[0].get("grammar")) is None:
        return []
    found = body.find_grammar()
    try:
        loosened = await gateway.loosen_grammar(spec, form.loose_names)
    except (UnsupportedSchema, InvalidRequest) as error:
        is_of_tools = spec.kind == "tools" and getattr(error, "path", TOOLS_PATH).startswith(TOOLS_PATH)
        param = "tools" if found is None or is_of_tools else found[0]
        raise ApiError(400, str(error), param=param, code=error.code) from None
    if form.loose_names:
        for args in submit_args:
            args["grammar"] = loosened.spec
    return name_loosened(endpoint, loosened.keywords)


async def _make_requests(
    submit_args: Sequence[SubmitArgs], size: PromptSize, pictures: ReadPictures
) -> list[EncodedRequest]:
    """Return the requests as they are published, once their pictures are stored. Raises `PenstockError`."""
    if submit_args:
        await pictures.store()
    if size.num_bytes < MIN_THREAD_BYTES:
        return _make_requests_here(submit_args)
    return await asyncio.to_thread(_make_requests_here, submit_args)


def _make_requests_here(submit_args: Sequence[SubmitArgs]) -> list[EncodedRequest]:
    return [encode_request(build_request(args)) for args in submit_args]


async def _admit_request(
    gateway: Gateway,
    caller: Caller,
    meta: StreamMeta,
    submit_args: Sequence[SubmitArgs],
    num_prompt_tokens: int,
    headers: RequestHeaders,
) -> Ticket:
    limited = [args.get("max_tokens", 0) for args in submit_args if "fit_context" not in args]
    try:
        return await gateway.admission.admit(
            caller,
            Pipeline(meta.pipeline),
            submit_args[0].get("priority_class", "interactive"),
            num_prompt_tokens + sum(limited),
            max_output=sum(args.get("max_tokens", 0) for args in submit_args),
            num_open=len(submit_args) - len(limited),
            max_wait_s=headers.x_penstock_reject_if_busy,
        )
    except ApiError as refused:
        if refused.status == 429 and (num_unread := gateway.unread.count(caller.tenant)):
            refused.args = (f"{refused}; {num_unread} of your unfinished requests are read by nobody any more",)
        raise


def _prompt_texts(args: SubmitArgs) -> Iterator[str]:
    yield args.get("prompt") or ""
    options = args.get("embed")
    query = (options.query if isinstance(options, EmbedOptions) else None) or ""
    yield from (query + text for text in args.get("texts") or () if isinstance(text, str))
    for message in args.get("messages") or ():
        turn = message.model_dump() if isinstance(message, ChatMessage) else message
        parts = [turn["content"]] if isinstance(turn["content"], str) else turn["content"]
        yield from (part for part in parts if isinstance(part, str))
        yield turn.get("reasoning_content") or ""
        yield turn.get("name") or ""
        yield from (call["function"]["arguments"] for call in turn.get("tool_calls") or ())
    if variables := args.get("chat_template_kwargs"):
        yield json.dumps(variables)


async def _join_earlier(
    gateway: Gateway,
    caller: Caller,
    found: StreamMeta,
    meta: StreamMeta,
    submit_args: Sequence[SubmitArgs],
    pictures: ReadPictures,
    check: Callable[[], Awaitable[list[str]]],
) -> Accepted:
    """Return the earlier request; its requests are published if they may not be durable."""
    if found.body_hash != meta.body_hash:
        message = "this Idempotency-Key was used with another body"
        raise ApiError(409, message, code="idempotency_conflict")
    await gateway.admission.take_request(caller)
    ignored = await check()
    if now_s() > found.published + REPUBLISH_AFTER_S:
        client = gateway.get_client(found.pipeline)
        known = await asyncio.gather(*(client.status(request_id) for request_id in found.request_ids))
        # A wish to cancel makes a record of the stage `new`: no worker has seen the request.
        is_seen = [status is not None and status.stage != "new" for status in known]
        await _check_remembered(client, [one for one, seen in zip(found.request_ids, is_seen, strict=True) if not seen])
        unseen = [args for args, seen in zip(submit_args, is_seen, strict=True) if not seen]
        requests = await _make_requests(unseen, measure_prompts(unseen), pictures)
        if requests:
            await _publish_requests(gateway, caller, found, requests, {}, None, is_keyed=True)
    options = found.options | {"stream_options": meta.options.get("stream_options")}
    return Accepted(found.model_copy(update={"options": options}), ignored=ignored)


async def _find_earlier(
    gateway: Gateway, served: ServedModel, stream_id: str, made: Sequence[SubmitArgs]
) -> StreamMeta | None:
    """Return the meta data of an earlier POST with the same key. Raises `ApiError` 410 where a pipeline of this model,
    which may have been the fallback then, knows one of its requests by the id alone.
    """
    found = await gateway.stream_metas.find_meta(stream_id)
    if found is None:
        for pipeline in {served.pipeline, *gateway.models.find_pipelines(served.name)}:
            await _check_remembered(gateway.get_client(pipeline), [str(args["id"]) for args in made])
    return found


async def _check_remembered(client: AsyncClient, request_ids: Sequence[str]) -> None:
    """Raise `ApiError` 410 if one of a key's requests has ended, and all but its id is forgotten."""
    if any(await asyncio.gather(*map(client.is_remembered, request_ids))):
        message = (
            "this Idempotency-Key was used, and its answer is no longer kept: the request has not run again. Send it "
            "with a new key to have it answered anew"
        )
        raise ApiError(410, message, code="idempotency_key_used")


async def _publish_requests(
    gateway: Gateway,
    caller: Caller,
    meta: StreamMeta,
    requests: Sequence[EncodedRequest],
    places: dict[str, str],
    arrived_s: float | None,
    *,
    is_keyed: bool,
) -> None:
    """Do steps 6 and 7. `places` gets the place of each request that is durable, also if another one is refused."""
    client = gateway.get_client(meta.pipeline)
    try:
        if meta.input_items is not None:
            await gateway.responses.mark_open(meta)
        is_own = caller.has_own_topics
        card = encode_meta(meta).decode() if gateway.settings.region.peers and not is_own else ""
        card = card if len(card) <= MAX_CARD_CHARS else ""
        sending = (client.send(encoded, arrived_s, caller.key, card, own_topics=is_own) for encoded in requests)
        sent = await asyncio.gather(*sending, return_exceptions=True)
        places |= {
            encoded.request.id: place
            for encoded, place in zip(requests, sent, strict=True)
            if not isinstance(place, BaseException)
        }
        failures = [one for one in sent if isinstance(one, BaseException)]
        if failures:  # an outage first: then it is not known what is durable, and the key is kept
            raise min(failures, key=lambda one: isinstance(one, RequestTooLarge))
    except PenstockError as error:
        gateway.stream_metas.stop_renewing(meta)
        if isinstance(error, BusUnavailable) and not isinstance(error, TopicsMissing):
            raise AcceptanceUnknown(str(error)) from error
        raise
    await gateway.stream_metas.note_published(meta, places, at_once=is_keyed)
