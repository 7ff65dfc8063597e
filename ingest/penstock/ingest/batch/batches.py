"""The store of batches. It is all in the object store: Redis holds nothing that a batch needs.

    open/<id>                              the tenant: marks a batch that has not ended
    tenants/<tenant>/batches/<id>/
        birth.json                         the batch's specification, and the models that existed then; written once
        input                              a copy of its input, as the file may be deleted meanwhile
        progress.json                      its progress; written by the gateway that works on it
        tokens                             how many tokens it may take, if its tenant has a limit; written once
        cancel                             when its cancellation was requested; written once
        parts/<holder>-<number>            finished lines; written once
        end.json                           its final state; written once, by the first gateway that ends it

Creating:  1  the mark in `open/`     2  `input`     3  `birth.json`: now the batch exists Ending:    4  `end.json`:
now it has ended     5  a webhook's event is due (`penstock.ingest.webhooks`)     6  parts and `input` are deleted
7  the mark is deleted

A crash in between leaves the mark, and the gateway that finds it goes on: after 1 or 2 the client has no answer yet,
so the rest is deleted an hour later; after 3 the batch is worked on; after 4, 5 or 6 the rest is done. The
event of step 5 is the same each time: one that was delivered before a crash after 5 or 6 is delivered again.

A part has one line for each finished row: its number, `o` (output) or `e` (error file), and the row. Each holder of
a batch names its parts after itself, so two holders never write the same object. A row that two holders finished,
one of them after a pause, is in two parts; the first in the order of names counts.
"""

import time
import uuid
from collections.abc import AsyncIterator, Sequence

from pydantic import BaseModel

from penstock.ingest.batch.lines import FinishedRow, split_lines
from penstock.ingest.batch.shapes import DAY_S, FILE_LIFE_S, BatchObject, BatchState, FileObject, NewBatch
from penstock.ingest.batch.store import content_path, is_id, make_id, names_after, parse_creation_time
from penstock.ingest.errors import ApiError, not_found_error
from penstock.ingest.tenants import Caller, list_allowed_regions
from penstock.objects import ObjectStorage
from penstock.sealing import has_tenant_keys, open_bytes, seal_bytes

COMPLETION_WINDOW_S = DAY_S
UNFINISHED_TTL_S = 3600.0
"""After this time a batch whose creation was interrupted is deleted."""


class BatchSpec(BaseModel):
    """The definition of a batch."""

    id: str
    tenant: str
    key: str = ""
    """The id of the API key that made it: its lines are counted by it."""
    regions: frozenset[str] | None = None
    """The regions that may answer its lines, in topics of its tenant's own; None: all, in those of all tenants."""
    weight: float = 1.0
    max_request_tokens: int | None = None
    """The most output tokens that one request of its tenant may ask for."""
    max_batch_tokens: int | None = None
    """The most tokens of all open batches of its tenant together."""
    endpoint: str
    input_file_id: str
    created_at: int
    expires_at: int
    metadata: dict[str, str] | None = None
    models: list[str] | None = None
    """The models that were known when it was accepted. Its lines wait for their workers, and a line for another model
    is an error, whatever a gateway knows later. None: none was known, and all lines wait until their model is served.
    """
    output_life_s: int = FILE_LIFE_S


class BatchStore:
    """All batches. Methods raise `ApiError` 404 for an unknown batch or another tenant's, and `StorageUnavailable`."""

    def __init__(self, objects: ObjectStorage, home: str = "") -> None:
        """`home` is the region in which batches are made, if there are regions."""
        self._objects, self._home = objects, home

    async def create_batch(
        self, caller: Caller, new: NewBatch, file: FileObject, models: list[str] | None = None
    ) -> BatchObject:
        """Create a batch of a file, whose lines may name `models`; None: it is not known which exist."""
        batch_id, now = make_id("batch_", self._home), int(time.time())
        spec = BatchSpec(
            id=batch_id,
            tenant=caller.tenant,
            key=caller.key,
            regions=list_allowed_regions(caller, self._home),
            weight=caller.weight,
            max_request_tokens=caller.max_request_tokens,
            max_batch_tokens=caller.max_batch_tokens,
            endpoint=new.endpoint,
            input_file_id=file.id,
            created_at=now,
            expires_at=now + round(COMPLETION_WINDOW_S),
            metadata=new.metadata,
            models=models,
            output_life_s=new.output_expires_after.seconds if new.output_expires_after else FILE_LIFE_S,
        )
        await self._objects.put(f"open/{batch_id}", caller.tenant.encode())
        if not await self._objects.copy_object(content_path(caller.tenant, file.id), object_path(spec, "input")):
            raise not_found_error("file", file.id)
        await self._objects.put(object_path(spec, "birth.json"), spec.model_dump_json().encode())
        return _make_batch_object(spec, BatchState(), cancelled_at=None)

    async def find_batch(self, tenant: str, batch_id: str) -> BatchObject:
        """Return the current state of a batch."""
        spec = await self.find_spec(tenant, batch_id)
        if spec is None:
            raise not_found_error("batch", batch_id[:64])
        return await self._describe_batch(spec)

    async def list_batches(self, tenant: str, *, after: str | None, limit: int) -> tuple[list[BatchObject], bool]:
        """Return at most `limit` batches older than `after`, the youngest first, and whether there are more."""
        names = (await self._objects.list_names(f"tenants/{tenant}/batches"))[::-1]
        found: list[BatchObject] = []
        for batch_id in names_after(names, after, "desc"):
            if len(found) > limit:
                break
            if (spec := await self.find_spec(tenant, batch_id)) is not None:
                found.append(await self._describe_batch(spec))
        return found[:limit], len(found) > limit

    async def cancel_batch(self, tenant: str, batch_id: str) -> BatchObject:
        """Request a batch's cancellation. Raises `ApiError` 409 if it has ended already."""
        now = await self.find_batch(tenant, batch_id)
        spec = await self.find_spec(tenant, batch_id)
        assert spec is not None, "it was found"
        if now.status in ("failed", "completed", "expired", "cancelled"):
            raise ApiError(409, f"Cannot cancel a batch with status '{now.status}'.", code="batch_ended")
        await self._objects.put_if_absent(object_path(spec, "cancel"), str(int(time.time())).encode())
        return await self._describe_batch(spec)

    async def find_spec(self, tenant: str, batch_id: str) -> BatchSpec | None:
        """Return the specification of a batch, or None."""
        if not is_id(batch_id, "batch_"):
            return None
        found = await self._objects.get(f"tenants/{tenant}/batches/{batch_id}/birth.json")
        spec = None if found is None else BatchSpec.model_validate_json(found)
        return spec if spec is not None and spec.tenant == tenant else None

    async def list_open_ids(self) -> list[str]:
        """Return the ids of the batches that have not ended, the oldest first."""
        return [name for name in await self._objects.list_names("open") if is_id(name, "batch_")]

    async def find_open_spec(self, batch_id: str) -> BatchSpec | None:
        """Return the specification of an open batch; None while its creation is under way or was interrupted."""
        tenant = await self._objects.get(f"open/{batch_id}")
        if tenant is None:
            return None
        spec = await self.find_spec(tenant.decode(), batch_id)
        if spec is None and parse_creation_time(batch_id) < time.time() - UNFINISHED_TTL_S:
            await self.clear_batch(
                BatchSpec(
                    id=batch_id, tenant=tenant.decode(), endpoint="", input_file_id="", created_at=0, expires_at=0
                )
            )
        return spec

    async def read_state(self, spec: BatchSpec) -> BatchState:
        """Return how far a batch is."""
        found = await self._objects.get(object_path(spec, "end.json")) or await self._objects.get(
            object_path(spec, "progress.json")
        )
        return BatchState() if found is None else BatchState.model_validate_json(found)

    async def read_cancel_time(self, spec: BatchSpec) -> int | None:
        """Return when its cancellation was requested, in seconds since the epoch, or None."""
        found = await self._objects.get(object_path(spec, "cancel"))
        return None if found is None else int(found)

    async def has_ended(self, spec: BatchSpec) -> bool:
        """Return whether a batch has ended."""
        return await self._objects.get_size(object_path(spec, "end.json")) is not None

    async def enqueue_tokens(self, spec: BatchSpec, num_tokens: int) -> int:
        """Write how many tokens a batch may take; return those of all open batches of its tenant.

        They are written first and added up then: of two batches that are checked at once, each sees the other.
        """
        await self._objects.put(object_path(spec, "tokens"), str(num_tokens).encode())
        own, enqueued = spec.tenant.encode(), 0
        for batch_id in await self.list_open_ids():
            if await self._objects.get(f"open/{batch_id}") == own:
                enqueued += int(await self._objects.get(f"tenants/{spec.tenant}/batches/{batch_id}/tokens") or 0)
        return enqueued

    async def save_state(self, spec: BatchSpec, state: BatchState) -> None:
        """Write how far a batch is."""
        await self._objects.put(object_path(spec, "progress.json"), state.model_dump_json().encode())

    async def end_batch(self, spec: BatchSpec, state: BatchState) -> bool:
        """End a batch, step 4. Return False if it had ended already."""
        return await self._objects.put_if_absent(object_path(spec, "end.json"), state.model_dump_json().encode())

    async def clear_batch(self, spec: BatchSpec) -> None:
        """Delete the parts and copies of an ended batch, and its mark: steps 6 and 7."""
        for name in await self._objects.list_names(object_path(spec, "parts")):
            await self._objects.delete(object_path(spec, f"parts/{name}"))
        await self._objects.delete(object_path(spec, "input"))
        await self._objects.delete(object_path(spec, "tokens"))
        await self._objects.delete(f"open/{spec.id}")

    async def _describe_batch(self, spec: BatchSpec) -> BatchObject:
        cancelled_at = await self.read_cancel_time(spec)
        return _make_batch_object(spec, await self.read_state(spec), cancelled_at)


class FinishedParts:
    """The parts of a batch, as one holder sees them."""

    def __init__(self, objects: ObjectStorage, spec: BatchSpec) -> None:
        self._objects, self._tenant, self._folder = objects, spec.tenant, object_path(spec, "parts")
        self._holder = f"{time.time_ns() // 1_000_000:012x}-{uuid.uuid4().hex[:8]}"
        self._count = 0
        self.finished_rows: set[int] = set()
        """Numbers of the lines that are in a part."""
        self.num_ok = 0

    async def load_finished(self) -> None:
        """Read which lines other holders have finished."""
        async for number, is_ok, _ in self._read_rows():
            self._note_finished(number, is_ok=is_ok)

    async def write_rows(self, rows: Sequence[FinishedRow]) -> None:
        """Write finished lines as a new part."""
        self._count += 1
        lines = [b"%d %s %s\n" % (row.number, b"o" if row.is_ok else b"e", row.line) for row in rows]
        name, tenant = f"{self._folder}/{self._holder}-{self._count:06d}", self._tenant
        await self._objects.put(name, bytes(seal_bytes("part", tenant, name, b"".join(lines))))
        for row in rows:
            self._note_finished(row.number, is_ok=row.is_ok)

    async def read_file_rows(self, *, ok: bool) -> AsyncIterator[bytes]:
        """Yield the lines of the output, or of the error file, each once, in the order in which they finished."""
        seen = set[int]()
        async for number, is_ok, row in self._read_rows():
            if number not in seen and is_ok is ok:
                yield row + b"\n"
            seen.add(number)

    async def _read_rows(self) -> AsyncIterator[tuple[int, bool, bytes]]:
        """Yield all written lines: number, whether it is output, row. A line can come twice."""
        for name in await self._objects.list_names(self._folder):
            async for _, line in split_lines(self._read_part(f"{self._folder}/{name}")):
                number, kind, row = line.split(b" ", 2)
                yield int(number), kind == b"o", row

    async def _read_part(self, path: str) -> AsyncIterator[bytes]:
        if has_tenant_keys():  # a part is no larger than what a holder had in memory to write it
            yield open_bytes("part", self._tenant, path, await self._objects.get(path) or b"")
            return
        async for chunk in self._objects.read_stream(path):
            yield chunk

    def _note_finished(self, number: int, *, is_ok: bool) -> None:
        if number not in self.finished_rows:
            self.finished_rows.add(number)
            self.num_ok += is_ok


def object_path(spec: BatchSpec, name: str) -> str:
    """Return the path of one of a batch's objects."""
    return f"tenants/{spec.tenant}/batches/{spec.id}/{name}"


def _make_batch_object(spec: BatchSpec, state: BatchState, cancelled_at: int | None) -> BatchObject:
    if cancelled_at is not None and state.status in ("validating", "in_progress"):
        state = state.model_copy(update={"status": "cancelling"})
    if cancelled_at is not None and state.status in ("cancelling", "finalizing", "cancelled"):
        state = state.model_copy(update={"cancelling_at": cancelled_at})
    fields = {"id": spec.id, "endpoint": spec.endpoint, "input_file_id": spec.input_file_id}
    times = {"created_at": spec.created_at, "expires_at": spec.expires_at, "metadata": spec.metadata}
    return BatchObject(**state.model_dump(), **fields, **times)
