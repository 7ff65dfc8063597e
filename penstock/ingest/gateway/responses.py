"""`/v1/responses/{id}`: a response again, while its stream can be read."""

from typing import Literal

from fastapi import APIRouter, Request
from pydantic import BaseModel

from penstock.ingest.errors import not_found
from penstock.ingest.gateway.handlers import errors
from penstock.ingest.gateway.state import CallerDep, Gateway, gateway_of
from penstock.ingest.gateway.streaming import cancelled, whole
from penstock.ingest.openai import RESPONSES, Card
from penstock.ingest.openai.responses import Response, begun

router = APIRouter()


class ResponseDeleted(BaseModel):
    """A response that is gone."""

    id: str
    object: Literal["response"] = "response"
    deleted: bool = True


@router.get(
    "/v1/responses/{response_id}",
    summary="Read a response again",
    responses=errors(400, 401, 404, 409, 413, 500, 503, 504),
)
async def read(request: Request, caller: CallerDep, response_id: str) -> Response:
    """Without its text while it is in progress; one that ended with an error is answered with that error."""
    gateway = gateway_of(request)
    card = await _card(gateway, response_id, caller.tenant)
    client, (name,) = gateway.client(card.pipeline), card.request_ids
    status = await client.status(name)
    if status is None or status.stage != "end":
        return begun(card)
    return RESPONSES.whole(card, await whole(gateway, card))


@router.delete("/v1/responses/{response_id}", summary="Delete a response", responses=errors(401, 404, 503))
async def delete(request: Request, caller: CallerDep, response_id: str) -> ResponseDeleted:
    """Its stream too; one that is in progress is cancelled."""
    gateway = gateway_of(request)
    card = await _card(gateway, response_id, caller.tenant)
    await cancelled(gateway, card)
    await gateway.cards.forget(card)
    return ResponseDeleted(id=card.id)


async def _card(gateway: Gateway, response_id: str, tenant: str) -> Card:
    card = await gateway.cards.of_tenant(response_id, tenant, kind="response")
    if card.path != RESPONSES.path:
        raise not_found("response", response_id[:256])
    return card
