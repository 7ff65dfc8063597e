"""`GET /v1/penstock/region`: what this gateway tells those of other regions; `…/regions`: how it sees all regions."""

from typing import Any, cast

from fastapi import APIRouter, Request
from pydantic import BaseModel

from penstock.ingest.errors import ApiError
from penstock.ingest.gateway.state import CallerDep, PeerDep, get_gateway
from penstock.ingest.http.handlers import error_responses
from penstock.ingest.regions.adopting import AdoptionMark
from penstock.ingest.regions.peers import STATE_PATH, SeenRegion
from penstock.ingest.regions.returning import ADOPTED_PATH, AdoptedIds
from penstock.ingest.regions.state import RegionState
from penstock.names import ADOPTED_REGIONS_KEY, Pipeline
from penstock.redis.client import translate_outages

router = APIRouter()


class Regions(BaseModel):
    """All regions, as this gateway sees them; its own one first."""

    regions: list[SeenRegion]


@router.get(STATE_PATH, summary="What this region tells its peers", responses=error_responses(404, 503))
async def region(gateway: PeerDep) -> RegionState:
    """Only for the gateways of other regions, which know `PENSTOCK_REGION_SECRET`; 404 for all others."""
    if gateway.peers is None or (told := gateway.peers.tell_state()) is None:
        raise ApiError(503, "this gateway does not know the state of its region now", code="unavailable")
    used = await gateway.limits.read_used()
    ended = gateway.returning.ended
    return told.model_copy(update={"is_stopping": gateway.is_stopping, "used": used, "ended": ended})


@router.get(ADOPTED_PATH, summary="What this region has adopted of a peer", responses=error_responses(404, 503))
async def adopted(gateway: PeerDep, name: str, known: float = 0.0) -> AdoptedIds:
    """For the gateways of that region. `known`: the time of the list that it has ended."""
    client: Any = gateway.redis
    with translate_outages():
        found = cast("bytes | None", await client.hget(ADOPTED_REGIONS_KEY, name))
        mark = None if found is None else AdoptionMark.parse(found)
        if mark is None or mark.done_s is None:
            return AdoptedIds(state="none" if mark is None else "publishing")
        pipelines = mark.pipelines if mark.done_s != known else ()
        ids = {one: await client.hkeys(Pipeline(one).region_key(name, "taken")) for one in pipelines}
    return AdoptedIds(state="finished", done_s=mark.done_s, ids=ids)


@router.get("/v1/penstock/regions", summary="How this gateway sees all regions", responses=error_responses(401, 503))
async def regions(request: Request, caller: CallerDep) -> Regions:
    """The list is empty where there are no regions. Callers with a key see no reasons, which name hosts."""
    gateway = get_gateway(request)
    seen = [] if gateway.peers is None else gateway.peers.describe_regions()
    if not gateway.keyring.is_open:
        seen = [one.model_copy(update={"reason": ""}) for one in seen]
    return Regions(regions=seen)
