"""`/v1/batches`."""

from typing import Annotated

from fastapi import APIRouter, Query, Request

from penstock.ingest.batch.shapes import BatchList, BatchObject, NewBatch
from penstock.ingest.gateway.caller import CallerDep
from penstock.ingest.gateway.errors import ApiError
from penstock.ingest.gateway.handlers import errors
from penstock.ingest.gateway.state import gateway_of

router = APIRouter()


@router.post("/v1/batches", summary="Make a batch", responses=errors(400, 401, 403, 404, 503))
async def create(request: Request, caller: CallerDep, new: NewBatch) -> BatchObject:
    """Of a file. It is looked at afterwards: `status` says what came of that."""
    gateway = gateway_of(request)
    if "batch" not in caller.classes:
        raise ApiError(403, "This API key may not use batches.", code="class_not_allowed")
    file = await gateway.desk.files.find(caller.tenant, new.input_file_id)
    if file.purpose != "batch":
        message = f"A batch is made of a file with the purpose 'batch', not {file.purpose!r}."
        raise ApiError(400, message, param="input_file_id", code="invalid_value")
    made = await gateway.desk.batches.create(caller, new, file)
    gateway.desk.runner.nudge()
    return made


@router.get("/v1/batches", summary="All batches", responses=errors(401, 503))
async def all_batches(
    request: Request,
    caller: CallerDep,
    after: Annotated[str | None, Query(max_length=128, description="The last id of the page before.")] = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
) -> BatchList:
    """A page of them, the youngest first."""
    page, has_more = await gateway_of(request).desk.batches.page(caller.tenant, after=after, limit=limit)
    ends = (page[0].id, page[-1].id) if page else (None, None)
    return BatchList(data=page, first_id=ends[0], last_id=ends[1], has_more=has_more)


@router.get("/v1/batches/{batch_id}", summary="One batch", responses=errors(401, 404, 503))
async def one_batch(request: Request, caller: CallerDep, batch_id: str) -> BatchObject:
    """How far it is."""
    return await gateway_of(request).desk.batches.find(caller.tenant, batch_id)


@router.post("/v1/batches/{batch_id}/cancel", summary="Cancel a batch", responses=errors(401, 404, 409, 503))
async def cancel(request: Request, caller: CallerDep, batch_id: str) -> BatchObject:
    """What is finished until then is in its output; the rest is in its error file."""
    return await gateway_of(request).desk.batches.cancel(caller.tenant, batch_id)
