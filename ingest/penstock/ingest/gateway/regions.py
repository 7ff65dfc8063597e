"""`GET /v1/penstock/region`: what this gateway tells those of other regions; `…/regions`: how it sees all regions."""

import secrets
from typing import Annotated

from fastapi import APIRouter, Header, Request
from pydantic import BaseModel

from penstock.ingest.errors import ApiError
from penstock.ingest.gateway.state import CallerDep, get_gateway
from penstock.ingest.http.handlers import error_responses
from penstock.ingest.regions.peers import STATE_PATH, SeenRegion
from penstock.ingest.regions.state import RegionState

router = APIRouter()


class Regions(BaseModel):
    """All regions, as this gateway sees them; its own one first."""

    regions: list[SeenRegion]


@router.get(STATE_PATH, summary="What this region tells its peers", responses=error_responses(404, 503))
async def region(request: Request, x_penstock_peer: Annotated[str, Header()] = "") -> RegionState:
    """Only for the gateways of other regions, which know `PENSTOCK_REGION_SECRET`; 404 for all others."""
    gateway = get_gateway(request)
    secret = gateway.settings.region.secret.encode()
    if gateway.peers is None or not secrets.compare_digest(x_penstock_peer.encode(), secret):
        raise ApiError(404, f"there is no path {STATE_PATH}", code="not_found")
    told = gateway.peers.tell_state()
    if told is None:
        raise ApiError(503, "this gateway does not know the state of its region now", code="unavailable")
    used = await gateway.limits.read_used()
    return told.model_copy(update={"is_stopping": gateway.is_stopping, "used": used})


@router.get("/v1/penstock/regions", summary="How this gateway sees all regions", responses=error_responses(401, 503))
async def regions(request: Request, caller: CallerDep) -> Regions:
    """The list is empty where there are no regions. Callers with a key see no reasons, which name hosts, and no numbers
    of requests.
    """
    gateway = get_gateway(request)
    seen = [] if gateway.peers is None else gateway.peers.describe_regions()
    if not gateway.keyring.is_open:
        seen = [one.model_copy(update={"reason": "", "requests": {}}) for one in seen]
    return Regions(regions=seen)
