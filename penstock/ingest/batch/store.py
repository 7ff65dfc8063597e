"""The files of all tenants.

    tenants/<tenant>/files/<id>.json      what is known of a file: whose it is, its name, length, purpose, end
    tenants/<tenant>/content/<id>         what is in it

Making one:    1  the content is written      2  the metadata is written: now there is a file
Deleting one:  3  the metadata is deleted: now there is none      4  the content is deleted

A crash between 1 and 2, or 3 and 4, leaves a content that no file has: room until the next `sweep`. Nobody has seen the
file in the first case, so its upload is repeated; in the second nobody sees it again.
"""

import re
import secrets
import time
from collections.abc import AsyncIterator
from typing import Literal

from pydantic import BaseModel

from penstock.ingest.batch.objects import ObjectStorage
from penstock.ingest.batch.shapes import DAY_S, FILE_LIFE_S, FileObject, Purpose
from penstock.ingest.errors import ApiError, not_found_error

IdPrefix = Literal["file-", "batch_"]
_ID_PATTERN = re.compile(r"(file-|batch_)([0-9a-f]{12})[0-9a-f]{20}")


class _StoredFile(BaseModel):
    tenant: str
    file: FileObject


class FileStore:
    """Methods raise `ApiError`: 404 for what is not there, is over, or is another tenant's; 503 without the store."""

    def __init__(self, objects: ObjectStorage) -> None:
        self._objects = objects

    async def save_file(
        self,
        tenant: str,
        filename: str,
        purpose: Purpose,
        pieces: AsyncIterator[bytes],
        *,
        life_s: int = FILE_LIFE_S,
        max_bytes: int | None = None,
    ) -> FileObject:
        """Make a file. What `pieces` raises is raised, and there is no file then."""
        saved = await self.save_content(tenant, pieces, max_bytes)
        return await self.save_metadata(tenant, saved, filename, purpose, life_s)

    async def save_content(
        self, tenant: str, pieces: AsyncIterator[bytes], max_bytes: int | None = None
    ) -> tuple[str, int]:
        """Step 1; returns the new id and the length."""
        file_id = make_id("file-")
        return file_id, await self._objects.write_stream(content_path(tenant, file_id), _limit_bytes(pieces, max_bytes))

    async def save_metadata(
        self, tenant: str, saved: tuple[str, int], filename: str, purpose: Purpose, life_s: int = FILE_LIFE_S
    ) -> FileObject:
        """Step 2."""
        file_id, num_bytes = saved
        now = int(time.time())
        made = FileObject(
            id=file_id, bytes=num_bytes, created_at=now, expires_at=now + life_s, filename=filename, purpose=purpose
        )
        await self._objects.put(
            _meta_path(tenant, file_id), _StoredFile(tenant=tenant, file=made).model_dump_json().encode()
        )
        return made

    async def delete_content(self, tenant: str, file_id: str) -> None:
        """Undo step 1."""
        await self._objects.delete(content_path(tenant, file_id))

    async def find_file(self, tenant: str, file_id: str) -> FileObject:
        """What is known of a file."""
        found = await self._objects.get(_meta_path(tenant, file_id)) if is_id(file_id, "file-") else None
        stored = None if found is None else _StoredFile.model_validate_json(found)
        if stored is None or stored.tenant != tenant or _is_expired(stored.file):
            raise not_found_error("file", file_id[:64])
        return stored.file

    async def list_files(
        self, tenant: str, *, after: str | None, limit: int, order: Literal["asc", "desc"], purpose: str | None = None
    ) -> tuple[list[FileObject], bool]:
        """At most `limit` files after the one named, by age, and whether there are more."""
        names = [name.removesuffix(".json") for name in await self._objects.list_names(f"tenants/{tenant}/files")]
        if order == "desc":
            names.reverse()
        found: list[FileObject] = []
        for file_id in names_after(names, after, order):
            if len(found) > limit:
                break
            try:
                file = await self.find_file(tenant, file_id)
            except ApiError as error:
                if error.status != 404:
                    raise
                continue  # deleted meanwhile, or over
            if purpose in (None, file.purpose):
                found.append(file)
        return found[:limit], len(found) > limit

    def read_content(self, tenant: str, file: FileObject) -> AsyncIterator[bytes]:
        """What is in a file, in pieces."""
        return self._objects.read_stream(content_path(tenant, file.id))

    async def delete_file(self, tenant: str, file_id: str) -> None:
        """Delete a file."""
        await self.find_file(tenant, file_id)
        await self._objects.delete(_meta_path(tenant, file_id))
        await self.delete_content(tenant, file_id)

    async def delete_expired(self) -> int:
        """Delete what is over, and contents of a day ago that no file has; returns how many contents went."""
        num_gone = 0
        for tenant in await self._objects.list_names("tenants"):
            for file_id in await self._objects.list_names(f"tenants/{tenant}/content"):
                if parse_creation_time(file_id) > time.time() - 3600:
                    continue
                found = await self._objects.get(_meta_path(tenant, file_id))
                is_orphan = found is None and parse_creation_time(file_id) < time.time() - DAY_S
                if is_orphan or (found is not None and _is_expired(_StoredFile.model_validate_json(found).file)):
                    await self._objects.delete(_meta_path(tenant, file_id))
                    await self.delete_content(tenant, file_id)
                    num_gone += 1
        return num_gone


def names_after(names: list[str], after: str | None, order: Literal["asc", "desc"]) -> list[str]:
    """The part of a sorted list after a name, which need not be there any more."""
    if after is None:
        return names
    return [name for name in names if (name > after if order == "asc" else name < after)]


def content_path(tenant: str, file_id: str) -> str:
    """Where a file's content is. Only for ids that were checked."""
    return f"tenants/{tenant}/content/{file_id}"


def _meta_path(tenant: str, file_id: str) -> str:
    return f"tenants/{tenant}/files/{file_id}.json"


def _is_expired(file: FileObject) -> bool:
    return file.expires_at is not None and file.expires_at <= time.time()


async def _limit_bytes(pieces: AsyncIterator[bytes], max_bytes: int | None) -> AsyncIterator[bytes]:
    num_bytes = 0
    async for piece in pieces:
        num_bytes += len(piece)
        if max_bytes is not None and num_bytes > max_bytes:
            raise ApiError(413, f"a file may have {max_bytes:,} bytes", code="file_too_large", param="file")
        yield piece


def make_id(prefix: IdPrefix) -> str:
    """The time in milliseconds and 80 random bits, in hex."""
    return f"{prefix}{time.time_ns() // 1_000_000:012x}{secrets.token_hex(10)}"


def is_id(text: str, prefix: IdPrefix) -> bool:
    """Whether `text` may be such an id: only then it becomes a part of a path."""
    match = _ID_PATTERN.fullmatch(text)
    return match is not None and match[1] == prefix


def parse_creation_time(some_id: str) -> float:
    """When an id was made, in seconds since the epoch; 0 for what is no id."""
    match = _ID_PATTERN.fullmatch(some_id)
    return int(match[2], 16) / 1000 if match else 0.0
