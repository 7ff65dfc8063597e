"""What is kept of batches, in the store. Redis holds nothing that a batch needs.

    open/<id>                              the tenant: this batch is not over, whoever has time works it off
    tenants/<tenant>/batches/<id>/
        birth.json                         what it is made of: written once
        input                              its input, a copy: the file may be deleted meanwhile
        progress.json                      how far it is: by whoever works on it
        tokens                             how many it may take, where its tenant has a limit: written once
        cancel                             when somebody asked for its end: written once
        parts/<holder>-<number>            finished lines, each with its number; written once
        end.json                           its end: written once, by the first who comes to it

Making one:  1  the mark in `open/`     2  `input`     3  `birth.json`: now there is a batch
Ending one:  4  `end.json`: now it is over     5  parts and `input` are deleted     6  the mark is deleted

A crash in between leaves the mark, and who finds it goes on: after 1 or 2 there was no answer yet, so the rest is
thrown away an hour later; after 3 it is worked off; after 4 or 5 what is left is deleted.
"""

import time

from pydantic import BaseModel

from penstock.ingest.batch.objects import Objects
from penstock.ingest.batch.shapes import DAY_S, FILE_LIFE_S, BatchObject, BatchState, FileObject, NewBatch
from penstock.ingest.batch.store import content_path, is_id, made_at, names_after, new_id
from penstock.ingest.errors import ApiError, not_found
from penstock.ingest.tenants import Caller

WINDOW_S = DAY_S
FORGET_S = 3600.0
"""After which a batch that was never quite made is thrown away."""


class Birth(BaseModel):
    """What a batch is made of."""

    id: str
    tenant: str
    weight: float = 1.0
    max_request_tokens: int | None = None
    """The most output tokens that its maker may ask for in one request."""
    max_batch_tokens: int | None = None
    """The most tokens of all open batches of its tenant."""
    endpoint: str
    input_file_id: str
    created_at: int
    expires_at: int
    metadata: dict[str, str] | None = None
    output_life_s: int = FILE_LIFE_S


class Batches:
    """All batches. Methods raise `ApiError`: 404 for what is not there or another's, 503 without the store."""

    def __init__(self, objects: Objects) -> None:
        self._objects = objects

    async def create(self, caller: Caller, new: NewBatch, file: FileObject) -> BatchObject:
        """Make a batch of a file."""
        batch_id, now = new_id("batch_"), int(time.time())
        birth = Birth(
            id=batch_id,
            tenant=caller.tenant,
            weight=caller.weight,
            max_request_tokens=caller.max_request_tokens,
            max_batch_tokens=caller.max_batch_tokens,
            endpoint=new.endpoint,
            input_file_id=file.id,
            created_at=now,
            expires_at=now + round(WINDOW_S),
            metadata=new.metadata,
            output_life_s=new.output_expires_after.seconds if new.output_expires_after else FILE_LIFE_S,
        )
        await self._objects.put(f"open/{batch_id}", caller.tenant.encode())
        if not await self._objects.copy(content_path(caller.tenant, file.id), place(birth, "input")):
            raise not_found("file", file.id)
        await self._objects.put(place(birth, "birth.json"), birth.model_dump_json().encode())
        return _told(birth, BatchState(), cancel=None)

    async def find(self, tenant: str, batch_id: str) -> BatchObject:
        """A batch as it is now."""
        birth = await self.birth(tenant, batch_id)
        if birth is None:
            raise not_found("batch", batch_id[:64])
        return await self._look(birth)

    async def page(self, tenant: str, *, after: str | None, limit: int) -> tuple[list[BatchObject], bool]:
        """At most `limit` batches older than the one named, the youngest first, and whether there are more."""
        names = (await self._objects.names(f"tenants/{tenant}/batches"))[::-1]
        found: list[BatchObject] = []
        for batch_id in names_after(names, after, "desc"):
            if len(found) > limit:
                break
            if (birth := await self.birth(tenant, batch_id)) is not None:
                found.append(await self._look(birth))
        return found[:limit], len(found) > limit

    async def cancel(self, tenant: str, batch_id: str) -> BatchObject:
        """Ask for a batch's end. Raises `ApiError` 409 where it has ended already."""
        now = await self.find(tenant, batch_id)
        birth = await self.birth(tenant, batch_id)
        assert birth is not None, "it was found"
        if now.status in ("failed", "completed", "expired", "cancelled"):
            raise ApiError(409, f"Cannot cancel a batch with status '{now.status}'.", code="batch_ended")
        await self._objects.create(place(birth, "cancel"), str(int(time.time())).encode())
        return await self._look(birth)

    async def birth(self, tenant: str, batch_id: str) -> Birth | None:
        """What a batch is made of; None where there is none."""
        if not is_id(batch_id, "batch_"):
            return None
        found = await self._objects.get(f"tenants/{tenant}/batches/{batch_id}/birth.json")
        birth = None if found is None else Birth.model_validate_json(found)
        return birth if birth is not None and birth.tenant == tenant else None

    async def open_ids(self) -> list[str]:
        """The batches that are not over, the oldest first."""
        return [name for name in await self._objects.names("open") if is_id(name, "batch_")]

    async def open_birth(self, batch_id: str) -> Birth | None:
        """What an open batch is made of. None where it is being made, or was never quite made."""
        tenant = await self._objects.get(f"open/{batch_id}")
        if tenant is None:
            return None
        birth = await self.birth(tenant.decode(), batch_id)
        if birth is None and made_at(batch_id) < time.time() - FORGET_S:
            await self._clear(
                Birth(id=batch_id, tenant=tenant.decode(), endpoint="", input_file_id="", created_at=0, expires_at=0)
            )
        return birth

    async def state(self, birth: Birth) -> BatchState:
        """How far a batch is."""
        found = await self._objects.get(place(birth, "end.json")) or await self._objects.get(
            place(birth, "progress.json")
        )
        return BatchState() if found is None else BatchState.model_validate_json(found)

    async def cancelled_at(self, birth: Birth) -> int | None:
        """When somebody asked for its end."""
        found = await self._objects.get(place(birth, "cancel"))
        return None if found is None else int(found)

    async def has_ended(self, birth: Birth) -> bool:
        """Whether it is over."""
        return await self._objects.size(place(birth, "end.json")) is not None

    async def enqueue(self, birth: Birth, num_tokens: int) -> int:
        """Say how many tokens it may take; returns those of all its tenant's open batches together.

        Said first and added up then: of two that are looked at in one moment, each sees the other.
        """
        await self._objects.put(place(birth, "tokens"), str(num_tokens).encode())
        own, enqueued = birth.tenant.encode(), 0
        for batch_id in await self.open_ids():
            if await self._objects.get(f"open/{batch_id}") == own:
                enqueued += int(await self._objects.get(f"tenants/{birth.tenant}/batches/{batch_id}/tokens") or 0)
        return enqueued

    async def save(self, birth: Birth, state: BatchState) -> None:
        """Say how far it is."""
        await self._objects.put(place(birth, "progress.json"), state.model_dump_json().encode())

    async def end(self, birth: Birth, state: BatchState) -> bool:
        """Steps 4 to 6; False if it had an end already."""
        is_first = await self._objects.create(place(birth, "end.json"), state.model_dump_json().encode())
        await self._clear(birth)
        return is_first

    async def clear_ended(self, birth: Birth) -> None:
        """Steps 5 and 6."""
        await self._clear(birth)

    async def _clear(self, birth: Birth) -> None:
        for name in await self._objects.names(place(birth, "parts")):
            await self._objects.delete(place(birth, f"parts/{name}"))
        await self._objects.delete(place(birth, "input"))
        await self._objects.delete(place(birth, "tokens"))
        await self._objects.delete(f"open/{birth.id}")

    async def _look(self, birth: Birth) -> BatchObject:
        cancel = await self.cancelled_at(birth)
        return _told(birth, await self.state(birth), cancel)


def place(birth: Birth, name: str) -> str:
    """The path of one of a batch's objects."""
    return f"tenants/{birth.tenant}/batches/{birth.id}/{name}"


def _told(birth: Birth, state: BatchState, cancel: int | None) -> BatchObject:
    if cancel is not None and state.status in ("validating", "in_progress"):
        state = state.model_copy(update={"status": "cancelling"})
    if cancel is not None and state.status in ("cancelling", "finalizing", "cancelled"):
        state = state.model_copy(update={"cancelling_at": cancel})
    made = {"id": birth.id, "endpoint": birth.endpoint, "input_file_id": birth.input_file_id}
    times = {"created_at": birth.created_at, "expires_at": birth.expires_at, "metadata": birth.metadata}
    return BatchObject(**state.model_dump(), **made, **times)
