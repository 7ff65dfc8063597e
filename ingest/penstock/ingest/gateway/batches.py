"""`/v1/files` and `/v1/batches`."""

from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Annotated, Any, Literal, cast

from fastapi import APIRouter, Query, Request
from pydantic import ValidationError
from starlette.requests import ClientDisconnect
from starlette.responses import StreamingResponse

from penstock.errors import PenstockError, reword_validation
from penstock.ingest.batch.shapes import (
    FILE_LIFE_S,
    BatchList,
    BatchObject,
    ExpiresAfter,
    FileDeleted,
    FileList,
    FileObject,
    NewBatch,
    Purpose,
)
from penstock.ingest.errors import ApiError
from penstock.ingest.gateway.state import CallerDep, Gateway, get_gateway
from penstock.ingest.http.handlers import error_responses
from penstock.ingest.http.upload import Upload
from penstock.sealing import find_sealer

router = APIRouter()
MAX_NAME_CHARS = 255
UPLOADED: tuple[Purpose, ...] = ("batch", "vision")
"""What files may be uploaded for: a batch's requests, and images in prompts."""
_FORM_SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["file", "purpose"],
    "properties": {
        "file": {"type": "string", "format": "binary", "description": "One request of a batch a line, or an image."},
        "purpose": {"type": "string", "enum": [*UPLOADED]},
        "expires_after[anchor]": {"type": "string", "enum": ["created_at"]},
        "expires_after[seconds]": {"type": "integer", "minimum": 3600, "maximum": FILE_LIFE_S},
    },
}


@router.post(
    "/v1/files",
    summary="Upload a file",
    responses=error_responses(400, 401, 403, 413, 503),
    openapi_extra={"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": _FORM_SCHEMA}}}},
)
async def upload(request: Request, caller: CallerDep) -> FileObject:
    """The content goes to the store as it arrives. The answer confirms that all of it is stored."""
    try:
        get_gateway(request).check_residency(caller)
        return await _receive_file(get_gateway(request), caller.tenant, Upload(request))
    except PenstockError:
        with suppress(ClientDisconnect, RuntimeError):  # the rest, as who still sends would not read the answer
            async for _ in request.stream():
                pass
        raise


async def _receive_file(gateway: Gateway, tenant: str, form: Upload) -> FileObject:
    files, saved = gateway.batch_service.files, None
    try:
        while await form.next_file():
            if saved is not None:
                raise ApiError(400, "Only one file at a time.", param="file", code="invalid_form")
            saved = await files.save_content(tenant, form.read_file(), gateway.batch_service.settings.max_file_bytes)
        if saved is None:
            raise ApiError(400, "Missing required parameter: 'file'.", param="file", code="missing_required_parameter")
        life_s = _parse_lifetime(form.fields)
        purpose = cast("Purpose", form.fields["purpose"])
        return await files.save_metadata(tenant, saved, form.filename[:MAX_NAME_CHARS] or "file", purpose, life_s)
    except BaseException:
        if saved is not None:
            await files.delete_content(tenant, saved[0])
        raise


def _parse_lifetime(fields: dict[str, str]) -> int:
    """Return how long the file is to be kept, in seconds. Raises `ApiError` 400."""
    if fields.get("purpose") not in UPLOADED:
        message = "'purpose' must be 'batch' or 'vision': nothing else is supported by this server."
        raise ApiError(400, message, param="purpose", code="invalid_value")
    given = {name: fields.get(f"expires_after[{name}]") for name in ("anchor", "seconds")}
    if given == {"anchor": None, "seconds": None}:
        return FILE_LIFE_S
    try:
        return ExpiresAfter.model_validate(given, strict=False).seconds
    except ValidationError as error:
        message = f"Invalid value for 'expires_after': {reword_validation(error.errors()[0]['msg'])}"
        raise ApiError(400, message, param="expires_after", code="invalid_value") from None


@router.get("/v1/files", summary="All files", responses=error_responses(401, 503))
async def all_files(
    request: Request,
    caller: CallerDep,
    after: Annotated[str | None, Query(max_length=128, description="The last id of the page before.")] = None,
    limit: Annotated[int, Query(ge=1, le=10_000)] = 100,
    order: Annotated[Literal["asc", "desc"], Query(description="By age; `desc`: the youngest first.")] = "desc",
    purpose: Annotated[str | None, Query(max_length=64)] = None,
) -> FileList:
    """A page of files."""
    files = get_gateway(request).batch_service.files
    page, has_more = await files.list_files(caller.tenant, after=after, limit=limit, order=order, purpose=purpose)
    ends = (page[0].id, page[-1].id) if page else (None, None)
    return FileList(data=page, first_id=ends[0], last_id=ends[1], has_more=has_more)


@router.get("/v1/files/{file_id}", summary="One file", responses=error_responses(401, 404, 503))
async def one_file(request: Request, caller: CallerDep, file_id: str) -> FileObject:
    """Its metadata."""
    return await get_gateway(request).batch_service.files.find_file(caller.tenant, file_id)


@router.get(
    "/v1/files/{file_id}/content",
    summary="What is in a file",
    response_class=StreamingResponse,
    responses={
        200: {
            "description": "The file.",
            "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}},
        },
        **error_responses(401, 404, 503),
    },
)
async def content(request: Request, caller: CallerDep, file_id: str) -> StreamingResponse:
    """Sent in chunks, as fast as the client reads."""
    files = get_gateway(request).batch_service.files
    file = await files.find_file(caller.tenant, file_id)
    find_sealer("file", caller.tenant, "")  # raises where all that the tenant has is erased
    chunks: AsyncIterator[bytes] = files.read_content(caller.tenant, file)
    headers = {"content-length": str(file.bytes), "x-content-type-options": "nosniff"}
    return StreamingResponse(chunks, media_type="application/octet-stream", headers=headers)


@router.delete("/v1/files/{file_id}", summary="Delete a file", responses=error_responses(401, 404, 503))
async def delete(request: Request, caller: CallerDep, file_id: str) -> FileDeleted:
    """Batches that were made of it go on: they have a copy."""
    await get_gateway(request).batch_service.files.delete_file(caller.tenant, file_id)
    return FileDeleted(id=file_id)


@router.post("/v1/batches", summary="Make a batch", responses=error_responses(400, 401, 403, 404, 503))
async def create(request: Request, caller: CallerDep, new: NewBatch) -> BatchObject:
    """Create a batch of a file. The file is checked afterwards: `status` has the outcome."""
    gateway = get_gateway(request)
    if "batch" not in caller.classes:
        raise ApiError(403, "This API key may not use batches.", code="class_not_allowed")
    gateway.check_residency(caller)
    file = await gateway.batch_service.files.find_file(caller.tenant, new.input_file_id)
    if file.purpose != "batch":
        message = f"A batch is made of a file with the purpose 'batch', not {file.purpose!r}."
        raise ApiError(400, message, param="input_file_id", code="invalid_value")
    # Before it is accepted: a gateway that goes on with it may not see their workers.
    models = await gateway.models.read_names()
    made = await gateway.batch_service.batches.create_batch(caller, new, file, models)
    gateway.batch_service.runner.look_now()
    return made


@router.get("/v1/batches", summary="All batches", responses=error_responses(401, 503))
async def all_batches(
    request: Request,
    caller: CallerDep,
    after: Annotated[str | None, Query(max_length=128, description="The last id of the page before.")] = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
) -> BatchList:
    """A page of batches, the youngest first."""
    page, has_more = await get_gateway(request).batch_service.batches.list_batches(
        caller.tenant, after=after, limit=limit
    )
    ends = (page[0].id, page[-1].id) if page else (None, None)
    return BatchList(data=page, first_id=ends[0], last_id=ends[1], has_more=has_more)


@router.get("/v1/batches/{batch_id}", summary="One batch", responses=error_responses(401, 404, 503))
async def one_batch(request: Request, caller: CallerDep, batch_id: str) -> BatchObject:
    """Its state and progress."""
    return await get_gateway(request).batch_service.batches.find_batch(caller.tenant, batch_id)


@router.post("/v1/batches/{batch_id}/cancel", summary="Cancel a batch", responses=error_responses(401, 404, 409, 503))
async def cancel(request: Request, caller: CallerDep, batch_id: str) -> BatchObject:
    """Lines that are finished by then are in the output; the rest is in the error file."""
    return await get_gateway(request).batch_service.batches.cancel_batch(caller.tenant, batch_id)
