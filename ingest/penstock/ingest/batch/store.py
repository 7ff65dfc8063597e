"""The files of all tenants.

    tenants/<tenant>/files/<id>.json      a file's metadata: tenant, name, length, purpose, expiry
    tenants/<tenant>/content/<id>         its content

Creating:  1  the content is written      2  the metadata is written: now the file exists Deleting:  3  the metadata
is deleted: now the file is gone      4  the content is deleted

A crash between 1 and 2, or 3 and 4, leaves a content without a file, which `delete_expired` removes. In the first
case the client has no answer, and uploads again; in the second the file is gone already.

An id begins with the time of its creation, so a list in the order of names is one by age.
"""

import re
import secrets
import time
from collections.abc import AsyncIterator
from typing import Literal

from pydantic import BaseModel

from penstock.ingest.batch.shapes import DAY_S, FILE_LIFE_S, FileObject, Purpose
from penstock.ingest.errors import ApiError, not_found_error
from penstock.objects import ObjectStorage
from penstock.regions import add_home
from penstock.sealing import open_file, seal_file

IdPrefix = Literal["file-", "batch_"]
_ID_PATTERN = re.compile(r"(file-|batch_)([0-9a-f]{12})[0-9a-f]{20}(?:-([a-z][a-z0-9-]{0,31}))?")


class _StoredFile(BaseModel):
    tenant: str
    file: FileObject


class FileStore:
    """Methods raise `ApiError` 404 for a file that is unknown, expired, or another tenant's; and
    `StorageUnavailable`.
    """

    def __init__(self, objects: ObjectStorage, home: str = "") -> None:
        """`home` is the region in which files are made, if there are regions."""
        self._objects, self._home = objects, home

    async def save_file(
        self,
        tenant: str,
        filename: str,
        purpose: Purpose,
        chunks: AsyncIterator[bytes],
        *,
        life_s: int = FILE_LIFE_S,
    ) -> FileObject:
        """Create a file. If `chunks` raises, that is raised, and there is no file."""
        saved = await self.save_content(tenant, chunks)
        return await self.save_metadata(tenant, saved, filename, purpose, life_s)

    async def save_content(
        self, tenant: str, chunks: AsyncIterator[bytes], max_bytes: int | None = None
    ) -> tuple[str, int]:
        """Write a content, step 1; return the new id and the length."""
        file_id = make_id("file-", self._home)
        measured = _MeasuredBytes(max_bytes)
        await self._objects.write_stream(
            content_path(tenant, file_id), seal_file(tenant, measured.limit_chunks(chunks))
        )
        return file_id, measured.num_bytes

    async def save_metadata(
        self, tenant: str, saved: tuple[str, int], filename: str, purpose: Purpose, life_s: int = FILE_LIFE_S
    ) -> FileObject:
        """Write the metadata, step 2."""
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
        """Delete a content; undoes step 1."""
        await self._objects.delete(content_path(tenant, file_id))

    async def find_file(self, tenant: str, file_id: str) -> FileObject:
        """Return a file's metadata."""
        found = await self._objects.get(_meta_path(tenant, file_id)) if is_id(file_id, "file-") else None
        stored = None if found is None else _StoredFile.model_validate_json(found)
        if stored is None or stored.tenant != tenant or _is_expired(stored.file):
            raise not_found_error("file", file_id[:64])
        return stored.file

    async def list_files(
        self, tenant: str, *, after: str | None, limit: int, order: Literal["asc", "desc"], purpose: str | None = None
    ) -> tuple[list[FileObject], bool]:
        """Return at most `limit` files after `after`, by age, and whether there are more."""
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
        """Yield a file's content in chunks."""
        return open_file(tenant, self._objects.read_stream(content_path(tenant, file.id)))

    async def delete_file(self, tenant: str, file_id: str) -> None:
        """Delete a file."""
        await self.find_file(tenant, file_id)
        await self._objects.delete(_meta_path(tenant, file_id))
        await self.delete_content(tenant, file_id)

    async def delete_expired(self) -> int:
        """Delete expired files, and contents without a file after a day; return how many contents were deleted."""
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
    """Return the part of a sorted list after a name, which need not be in it any more."""
    if after is None:
        return names
    return [name for name in names if (name > after if order == "asc" else name < after)]


def content_path(tenant: str, file_id: str) -> str:
    """Return the path of a file's content. The id must have been checked."""
    return f"tenants/{tenant}/content/{file_id}"


def _meta_path(tenant: str, file_id: str) -> str:
    return f"tenants/{tenant}/files/{file_id}.json"


def _is_expired(file: FileObject) -> bool:
    return file.expires_at is not None and file.expires_at <= time.time()


class _MeasuredBytes:
    """Counts the bytes of a content, which may be sealed behind it."""

    def __init__(self, max_bytes: int | None) -> None:
        self._max_bytes, self.num_bytes = max_bytes, 0

    async def limit_chunks(self, chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """Yield the chunks. Raises `ApiError` 413 where they are too many bytes."""
        async for chunk in chunks:
            self.num_bytes += len(chunk)
            if self._max_bytes is not None and self.num_bytes > self._max_bytes:
                raise ApiError(413, f"a file may have {self._max_bytes:,} bytes", code="file_too_large", param="file")
            yield chunk


def make_id(prefix: IdPrefix, home: str = "") -> str:
    """Return a new id: the time in milliseconds and 80 random bits, in hex, and the region that made it, if any."""
    return add_home(f"{prefix}{time.time_ns() // 1_000_000:012x}{secrets.token_hex(10)}", home)


def is_id(text: str, prefix: IdPrefix) -> bool:
    """Return whether `text` has the form of such an id; only then it may become part of a path."""
    match = _ID_PATTERN.fullmatch(text)
    return match is not None and match[1] == prefix


def parse_home(some_id: str) -> str:
    """Return the region that made an id; an empty text where there are no regions, and for any other text."""
    match = _ID_PATTERN.fullmatch(some_id)
    return (match[3] or "") if match else ""


def parse_creation_time(some_id: str) -> float:
    """Return when an id was made, in seconds since the epoch; 0 for any other text."""
    match = _ID_PATTERN.fullmatch(some_id)
    return int(match[2], 16) / 1000 if match else 0.0
