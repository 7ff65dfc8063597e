"""Routes for the gateways of other regions: lines of their batches, and packed weights."""

import asyncio
import time
from dataclasses import asdict

from fastapi import APIRouter, Response
from starlette.responses import FileResponse, JSONResponse

from penstock.engine.weights.files import find_packed_by_digest
from penstock.ingest.batch.answer import RowAnswers
from penstock.ingest.batch.lines import FinishedRow, LentRow
from penstock.ingest.errors import ApiError
from penstock.ingest.gateway.state import Gateway, PeerDep
from penstock.ingest.regions.lending import LEASE_S, ROWS_PATH, UNDER_WAY_STATUS
from penstock.ingest.regions.peers import LOOK_S

router = APIRouter(include_in_schema=False)


@router.post(ROWS_PATH)
async def answer_row(gateway: PeerDep, lent: LentRow) -> Response:
    """Answer a line: 200 with the answer, 202 if it is under way, else 409."""
    finished = await _answer_lent(gateway, lent)
    if finished is None:
        return Response(status_code=UNDER_WAY_STATUS)
    return JSONResponse({**asdict(finished), "line": finished.line.decode(), "usage": finished.usage.model_dump()})


async def _answer_lent(gateway: Gateway, lent: LentRow) -> FinishedRow | None:
    """Answer a line that was lent here. Return None if it is under way when its lease is over or this gateway stops.

    Raises `ApiError` 409 for a line that goes back.
    """
    rows = RowAnswers(lent.terms, gateway.lent_pipelines)
    answering, begun_at = asyncio.create_task(rows.answer_row(lent.row)), time.monotonic()
    try:
        while not (await asyncio.wait((answering,), timeout=LOOK_S))[0]:
            if gateway.is_stopping:
                return None
            if time.monotonic() > begun_at + LEASE_S:
                if await rows.is_begun(lent.row):
                    return None
                await rows.cancel_row(lent.row)
                raise ApiError(409, "no worker has begun this line within its lease", code="row_given_back")
    finally:
        answering.cancel()
    if not (finished := answering.result()).is_ok:
        raise ApiError(409, "this line has no answer here", code="row_given_back")
    return finished


@router.post(f"{ROWS_PATH}/cancel")
async def cancel_row(gateway: PeerDep, lent: LentRow) -> Response:
    """Cancel a line that was lent here."""
    await RowAnswers(lent.terms, gateway.lent_pipelines).cancel_row(lent.row)
    return Response(status_code=204)


@router.get("/v1/penstock/weights/{digest}")
def packed_weights(gateway: PeerDep, digest: str) -> FileResponse:
    """Send a packed file that workers with this gateway's settings may find, or a part of it (`Range`)."""
    found = find_packed_by_digest(gateway.settings.engine, digest)
    if found is None:
        raise ApiError(404, f"no packed weights with the digest {digest!r} here", code="not_found")
    return FileResponse(found)
