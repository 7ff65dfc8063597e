"""Routes for the gateways of other regions: lines of their batches, and packed weights."""

import secrets
from dataclasses import asdict
from typing import Annotated

from fastapi import APIRouter, Depends, Header, Request, Response
from starlette.responses import FileResponse, JSONResponse

from penstock.engine.weights.files import find_packed_by_digest
from penstock.ingest.batch.answer import LentRow, RowAnswers
from penstock.ingest.errors import ApiError
from penstock.ingest.gateway.state import Gateway, get_gateway
from penstock.ingest.regions.lending import ROWS_PATH, UNDER_WAY_STATUS, answer_lent

router = APIRouter(include_in_schema=False)


def find_asked(request: Request, x_penstock_peer: Annotated[str, Header()] = "") -> Gateway:
    """Return the gateway that a peer asks. Raises `ApiError` 404 for all who do not know `PENSTOCK_REGION_SECRET`."""
    gateway = get_gateway(request)
    secret = gateway.settings.region.secret.encode()
    if gateway.peers is None or not secrets.compare_digest(x_penstock_peer.encode(), secret):
        raise ApiError(404, f"there is no path {request.url.path}", code="not_found")
    return gateway


GatewayDep = Annotated[Gateway, Depends(find_asked)]


@router.post(ROWS_PATH)
async def answer_row(gateway: GatewayDep, lent: LentRow) -> Response:
    """Answer a line: 200 with the answer, 202 if it is under way, else 409."""
    finished = await answer_lent(lent, gateway.lent_pipelines, lambda: gateway.is_stopping)
    if finished is None:
        return Response(status_code=UNDER_WAY_STATUS)
    return JSONResponse({**asdict(finished), "line": finished.line.decode(), "usage": finished.usage.model_dump()})


@router.post(f"{ROWS_PATH}/cancel")
async def cancel_row(gateway: GatewayDep, lent: LentRow) -> Response:
    """Cancel a line that was lent here."""
    await RowAnswers(lent.terms, gateway.lent_pipelines).cancel_row(lent.row)
    return Response(status_code=204)


@router.get("/v1/penstock/weights/{digest}")
def packed_weights(gateway: GatewayDep, digest: str) -> FileResponse:
    """Send a packed file that workers with this gateway's settings may find, or a part of it (`Range`)."""
    found = find_packed_by_digest(gateway.settings.engine, digest)
    if found is None:
        raise ApiError(404, f"no packed weights with the digest {digest!r} here", code="not_found")
    return FileResponse(found)
