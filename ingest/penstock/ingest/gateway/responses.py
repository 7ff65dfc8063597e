"""`/v1/responses/{id}`: a response that is kept, while it is made and afterwards; and the turns before a new one."""

import asyncio
import json
from collections.abc import Sequence
from contextlib import suppress
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Header, Query, Request
from fastapi import Response as HttpResponse
from pydantic import BaseModel

from penstock.errors import RequestTooLarge
from penstock.ingest.errors import ApiError
from penstock.ingest.gateway.kept_responses import KeptResponse, read_whole_log
from penstock.ingest.gateway.state import CallerDep, Gateway, get_gateway
from penstock.ingest.http.handlers import error_responses
from penstock.ingest.openai.body import unsupported_value
from penstock.ingest.openai.endpoint import EarlierTurns
from penstock.ingest.openai.picture_parts import KeptPicture, change_addresses, refuse_kept_addresses
from penstock.ingest.openai.response_items import find_response_id
from penstock.ingest.openai.responses import (
    Response,
    ResponseBody,
    describe_input_items,
    identify_input_items,
    make_response,
    make_unfinished_response,
)
from penstock.ingest.openai.sse import ResumePoint
from penstock.ingest.streaming.answers import EVENT_STREAM_CONTENT, make_event_stream
from penstock.messages import MAX_REQUEST_BYTES

router = APIRouter()

CANCEL_WAIT_S = 2.0
"""How long a cancelled response may take to end, before it is described as it is."""
PREVIOUS = "previous_response_id"


class ResponseDeleted(BaseModel):
    """A response that was deleted."""

    id: str
    object: Literal["response"] = "response"
    deleted: bool = True


class InputItemList(BaseModel):
    """A page of what a response was asked."""

    object: Literal["list"] = "list"
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


@router.get(
    "/v1/responses/{response_id}",
    summary="Read a response again",
    response_model=None,
    responses={
        200: {
            "model": Response,
            "description": "The response; with `stream`, its events after `starting_after`.",
            "content": EVENT_STREAM_CONTENT,
        },
        204: {"description": "That was the last event: a browser's EventSource stops."},
        **error_responses(400, 401, 404, 409, 413, 500, 503, 504),
    },
)
async def read(
    request: Request,
    caller: CallerDep,
    response_id: str,
    stream: bool = False,
    starting_after: Annotated[int | None, Query(ge=0, description="The number of the last event seen.")] = None,
    last_event_id: Annotated[str | None, Header(max_length=8192)] = None,
) -> HttpResponse:
    """Without its text while it is in progress. With `stream` it is sent from the beginning, or after an event."""
    gateway = get_gateway(request)
    found = await gateway.responses.find_response(caller.tenant, response_id)
    if not stream:
        if starting_after is not None:
            raise ApiError(400, "'starting_after' needs 'stream'.", param="starting_after", code="invalid_value")
        described = await describe_response(gateway, found)
        return HttpResponse(described.model_dump_json(), media_type="application/json")
    resume_point = ResumePoint(1, last_event_id)
    if resume_point.is_over:
        return HttpResponse(status_code=204)
    if found.events is None:
        await gateway.unread.note_reader(found.meta)
    after_number = -1 if starting_after is None else starting_after
    return make_event_stream(gateway, found.meta, resume_point, after_number=after_number, whole_log=found.events)


@router.delete("/v1/responses/{response_id}", summary="Delete a response", responses=error_responses(401, 404, 503))
async def delete(request: Request, caller: CallerDep, response_id: str) -> ResponseDeleted:
    """Deletes its stream too; a response in progress is cancelled."""
    gateway = get_gateway(request)
    found = await gateway.responses.find_response(caller.tenant, response_id)
    if found.events is None:
        await gateway.cancel_requests(found.meta)
    await gateway.responses.delete_response(found.meta)
    return ResponseDeleted(id=found.meta.id)


@router.post(
    "/v1/responses/{response_id}/cancel",
    summary="Cancel a response",
    responses=error_responses(400, 401, 404, 409, 500, 503, 504),
)
async def cancel_response(request: Request, caller: CallerDep, response_id: str) -> Response:
    """Only one with `background`. One that has ended already stays as it is."""
    gateway = get_gateway(request)
    found = await gateway.responses.find_response(caller.tenant, response_id)
    if not found.meta.options.get("background"):
        message = "Only a response with 'background' is cancelled here; any is at /v1/streams/{id}/cancel."
        raise ApiError(400, message, code="not_in_background")
    if found.events is None and await gateway.cancel_requests(found.meta):
        described = await describe_response(gateway, found)
        if described.status != "cancelled":
            with suppress(TimeoutError):
                async with asyncio.timeout(CANCEL_WAIT_S):
                    return make_response(found.meta, await read_whole_log(gateway.read_events(found.meta)))
    return await describe_response(gateway, found)


@router.get(
    "/v1/responses/{response_id}/input_items",
    summary="What a response was asked",
    responses=error_responses(400, 401, 404, 503),
)
async def list_input_items(
    request: Request,
    caller: CallerDep,
    response_id: str,
    after: Annotated[str | None, Query(max_length=256, description="The last id of the page before.")] = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    order: Annotated[Literal["asc", "desc"], Query(description="`desc`: the last first.")] = "desc",
) -> InputItemList:
    """Its own input, without that of the responses before it."""
    found = await get_gateway(request).responses.find_response(caller.tenant, response_id)
    items = describe_input_items(found.meta)
    if order == "desc":
        items.reverse()
    ids = [item["id"] for item in items]
    if after is not None:
        if after not in ids:
            raise ApiError(400, f"{after!r} is no item of this response", param="after", code="invalid_value")
        items = items[ids.index(after) + 1 :]
    page = await get_gateway(request).pictures.show_kept(caller.tenant, items[:limit])
    ends = (page[0]["id"], page[-1]["id"]) if page else (None, None)
    return InputItemList(data=page, first_id=ends[0], last_id=ends[1], has_more=len(items) > limit)


async def describe_response(gateway: Gateway, found: KeptResponse) -> Response:
    """Return a response as it is now. A cancelled request that no worker has seen yet will not be answered."""
    if found.events is not None:
        return make_response(found.meta, found.events)
    status = await gateway.get_client(found.meta.pipeline).status(found.meta.request_ids[0])
    if status is not None and status.stage == "end":
        return make_response(found.meta, await read_whole_log(gateway.read_events(found.meta)))
    if status is not None and status.stage != "new":
        return make_unfinished_response(found.meta, "in_progress")
    if status is not None and status.cancelled:
        return make_unfinished_response(found.meta, "cancelled")
    return make_unfinished_response(found.meta, "queued" if found.meta.options.get("background") else "in_progress")


async def prepare_response(
    gateway: Gateway, tenant: str, body: ResponseBody
) -> tuple[ResponseBody, list[dict[str, Any]] | None, EarlierTurns | None]:
    """Return a new response's body with the turns before it, its own items, and the turns alone.

    The items are None unless the response is to be kept; the turns are None where no response is before it.

    Raises `ApiError`, `RequestTooLarge` and `BusUnavailable`.
    """
    is_on = gateway.responses.is_on
    for param in ("store", "background"):
        if getattr(body, param) and not is_on:
            raise unsupported_value(param, "this server keeps no responses.")
    if is_on and body.store is not False:
        refuse_kept_addresses(body.make_items())
    if not isinstance(body.input, str) and (references := body.references):
        body = body.replace_references(await _read_named_items(gateway, tenant, references))
    input_items = body.make_items() if is_on and body.store is not False else None
    if body.previous_response_id is not None:
        earlier = await _read_earlier(gateway, tenant, body.previous_response_id)
        return body.add_history(earlier.items), input_items, earlier
    return body, input_items, None


async def _read_named_items(gateway: Gateway, tenant: str, item_ids: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return the items with these ids. Raises `ApiError` 404.

    An item's id names the response that it is of, and a response has copies of the items before it. So from the last
    item on, one or two responses are read, however many the items are of.
    """
    named: dict[str, dict[str, Any]] = {}
    known: dict[str, dict[str, Any]] = {}
    for item_id in reversed(item_ids):
        if item_id not in known:
            known = await _read_items(gateway, tenant, find_response_id(item_id)) | known
        if item_id not in known:
            what = f"Item with id {item_id!r} not found. Items are kept with their response, unless 'store' is false:"
            message = f"{what} send the item itself, or leave it out."
            raise ApiError(404, message, param="input", code="item_not_found")
        named[item_id] = known[item_id]
    if len(json.dumps([named[item_id] for item_id in item_ids])) > MAX_REQUEST_BYTES:
        raise RequestTooLarge(f"the items that 'input' names have more than {MAX_REQUEST_BYTES:,} bytes")
    return named


async def _read_items(gateway: Gateway, tenant: str, response_id: str | None) -> dict[str, dict[str, Any]]:
    """Return the items of a response, of what it was asked and of the turns before it, by their ids."""
    if response_id is None:
        return {}
    try:
        found = await gateway.responses.find_response(tenant, response_id)
    except ApiError as error:
        if error.status != 404:
            raise
        return {}
    output = [_make_input_of_output(item) for item in (await describe_response(gateway, found)).output]
    earlier = [] if found.meta.earlier is None else found.meta.earlier.items
    items = change_addresses([*earlier, *identify_input_items(found.meta), *output], KeptPicture.of_kept)
    return {item["id"]: item for item in items if item.get("id")}


async def _read_earlier(gateway: Gateway, tenant: str, response_id: str) -> EarlierTurns:
    """Return the turns of a response, behind those before it.

    The response has a copy of the turns before it. One that was kept by an earlier version has none: the response
    before it is read as well.
    """
    turns: list[list[dict[str, Any]]] = []
    first_id = response_id
    previous: str | None = response_id
    num_bytes = 0
    while previous is not None:
        found = await _find_previous(gateway, tenant, previous)
        response = await describe_response(gateway, found)
        if response.status not in ("completed", "incomplete"):
            message = f"The response {previous!r} is {response.status}: nothing can follow it."
            raise ApiError(400, message, param=PREVIOUS, code="previous_response_not_completed")
        earlier = found.meta.earlier
        own = [*(found.meta.input_items or ()), *map(_make_input_of_output, response.output)]
        turns.append(own if earlier is None else [*earlier.items, *own])
        num_bytes += len(json.dumps(turns[-1]))
        if num_bytes > MAX_REQUEST_BYTES:
            raise RequestTooLarge(f"the turns before this one have more than {MAX_REQUEST_BYTES:,} bytes")
        first_id, previous = (
            (previous, found.meta.options.get(PREVIOUS)) if earlier is None else (earlier.first_id, None)
        )
    items = [item for turn in reversed(turns) for item in turn]
    return EarlierTurns(first_id=first_id, items=change_addresses(items, KeptPicture.of_kept))


async def _find_previous(gateway: Gateway, tenant: str, response_id: str) -> KeptResponse:
    try:
        return await gateway.responses.find_response(tenant, response_id)
    except ApiError as error:
        if error.status != 404:
            raise
        message = f"Previous response with id {response_id[:256]!r} not found."
        raise ApiError(404, message, param=PREVIOUS, code="previous_response_not_found") from None


def _make_input_of_output(item: BaseModel) -> dict[str, Any]:
    # An item of another kind than a message has none of these.
    return item.model_dump(exclude={"content": {"__all__": {"logprobs", "annotations"}}})
