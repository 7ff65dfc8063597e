"""`/v1/responses/{id}`: a response again, while its stream can be read."""

from typing import Literal

from fastapi import APIRouter, Request
from pydantic import BaseModel

from penstock.ingest.errors import not_found_error
from penstock.ingest.gateway.handlers import error_responses
from penstock.ingest.gateway.state import CallerDep, Gateway, get_gateway
from penstock.ingest.gateway.streaming import cancel_requests, read_answers
from penstock.ingest.openai import RESPONSES, StreamMeta
from penstock.ingest.openai.responses import Response, make_unfinished_response

router = APIRouter()


class ResponseDeleted(BaseModel):
    """A response that was deleted."""

    id: str
    object: Literal["response"] = "response"
    deleted: bool = True


@router.get(
    "/v1/responses/{response_id}",
    summary="Read a response again",
    responses=error_responses(400, 401, 404, 409, 413, 500, 503, 504),
)
async def read(request: Request, caller: CallerDep, response_id: str) -> Response:
    """Without its text while it is in progress; a response that failed is answered with its error."""
    gateway = get_gateway(request)
    meta = await _find_response_meta(gateway, response_id, caller.tenant)
    client, (name,) = gateway.get_client(meta.pipeline), meta.request_ids
    status = await client.status(name)
    if status is None or status.stage != "end":
        return make_unfinished_response(meta)
    return RESPONSES.make_answer(meta, await read_answers(gateway, meta))


@router.delete("/v1/responses/{response_id}", summary="Delete a response", responses=error_responses(401, 404, 503))
async def delete(request: Request, caller: CallerDep, response_id: str) -> ResponseDeleted:
    """Deletes its stream too; a response in progress is cancelled."""
    gateway = get_gateway(request)
    meta = await _find_response_meta(gateway, response_id, caller.tenant)
    await cancel_requests(gateway, meta)
    await gateway.stream_metas.delete_meta(meta)
    return ResponseDeleted(id=meta.id)


async def _find_response_meta(gateway: Gateway, response_id: str, tenant: str) -> StreamMeta:
    meta = await gateway.stream_metas.find_of_tenant(response_id, tenant, kind="response")
    if meta.path != RESPONSES.path:
        raise not_found_error("response", response_id[:256])
    return meta
