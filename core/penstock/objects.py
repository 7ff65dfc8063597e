"""Objects by path, in a folder or an S3-like store. Files, batches, responses and large pictures are kept in it.

Callers build paths from a tenant and from ids that were checked. An object exists as a whole or not at all, also
after a crash; a reader never sees half of one.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import ParamSpec, TypeVar

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError
from obstore.store import LocalStore, ObjectStore, from_url

from penstock.errors import StorageUnavailable

CHUNK_BYTES = 2**20
"""Streams are read and written by so many bytes at a time."""
NUM_STORE_THREADS = 8

P = ParamSpec("P")
T = TypeVar("T")


class ObjectStorage:
    """An object store. Every method raises `StorageUnavailable` while it cannot be reached."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._threads = ThreadPoolExecutor(NUM_STORE_THREADS, "files")

    @classmethod
    def open(cls, url: str) -> "ObjectStorage":
        """Open a folder, by path or `file://`, which is created if need be; or `s3://bucket/prefix` and the like."""
        if "://" not in url:
            return cls(LocalStore(Path(url).expanduser(), mkdir=True))
        return cls(from_url(url, mkdir=True) if url.startswith("file:") else from_url(url))

    async def get(self, path: str) -> bytes | None:
        """Return an object's content, or None."""
        try:
            return await self._run_blocking(lambda: bytes(obstore.get(self._store, path).bytes()))
        except FileNotFoundError:
            return None

    async def get_size(self, path: str) -> int | None:
        """Return an object's length in bytes, or None."""
        try:
            return (await self._run_blocking(obstore.head, self._store, path))["size"]
        except FileNotFoundError:
            return None

    async def get_time(self, path: str) -> float | None:
        """Return when an object was written, in seconds since the epoch, or None."""
        try:
            return (await self._run_blocking(obstore.head, self._store, path))["last_modified"].timestamp()
        except FileNotFoundError:
            return None

    async def put(self, path: str, value: bytes) -> None:
        """Write an object; one that exists is replaced."""
        await self._run_blocking(lambda: obstore.put(self._store, path, value))

    async def put_if_absent(self, path: str, value: bytes) -> bool:
        """Write an object unless it exists; return whether it was written. One of several writers succeeds."""
        try:
            await self._run_blocking(lambda: obstore.put(self._store, path, value, mode="create"))
        except AlreadyExistsError:
            return False
        return True

    async def copy_object(self, source: str, target: str) -> bool:
        """Copy an object within the store; return False if it does not exist."""
        try:
            await self._run_blocking(obstore.copy, self._store, source, target)
        except FileNotFoundError:
            return False
        return True

    async def delete(self, path: str) -> None:
        """Delete an object, if it exists."""
        with suppress(FileNotFoundError):
            await self._run_blocking(obstore.delete, self._store, path)

    async def list_names(self, folder: str) -> list[str]:
        """Return the sorted names of objects and folders in a folder."""
        found = await self._run_blocking(obstore.list_with_delimiter, self._store, folder)
        paths = [*(entry["path"] for entry in found["objects"]), *found["common_prefixes"]]
        return sorted(path.rstrip("/").rpartition("/")[2] for path in paths)

    async def list_by_age(self, folder: str) -> list[tuple[float, str]]:
        """Return when each object in a folder was written, in seconds since the epoch, and its name, oldest first."""
        found = await self._run_blocking(obstore.list_with_delimiter, self._store, folder)
        return sorted(
            (entry["last_modified"].timestamp(), entry["path"].rpartition("/")[2]) for entry in found["objects"]
        )

    async def write_stream(self, path: str, chunks: AsyncIterator[bytes]) -> int:
        """Write an object of any length, a chunk at a time; return its length.

        If `chunks` raises, or this is cancelled, there is no object, and what was written is removed.
        """
        writer = await self._run_blocking(
            lambda: obstore.open_writer(self._store, path, buffer_size=5 * CHUNK_BYTES, max_concurrency=2)
        )
        num_bytes = 0
        try:
            async for chunk in _join_chunks(chunks):
                num_bytes += len(chunk)
                await self._run_blocking(writer.write, chunk)
            await self._run_blocking(writer.close)
        except BaseException as error:
            await asyncio.shield(self._run_blocking(writer.__exit__, type(error), error, None))
            raise
        return num_bytes

    async def read_stream(self, path: str) -> AsyncIterator[bytes]:
        """Yield an object's content in chunks. Nothing is held open between them, so a reader may take a day."""
        size = await self.get_size(path)
        for start in range(0, size or 0, CHUNK_BYTES):
            end = min(size or 0, start + CHUNK_BYTES)
            yield bytes(await self._run_blocking(obstore.get_range, self._store, path, start=start, end=end))

    def close(self) -> None:
        """Wait for calls under way."""
        self._threads.shutdown()

    async def _run_blocking(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, lambda: call(*args, **kwargs))
        except (FileNotFoundError, AlreadyExistsError):
            raise
        except (BaseError, OSError) as error:
            raise StorageUnavailable("the file store cannot be used now") from error


async def _join_chunks(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yield the same bytes in chunks of at least `CHUNK_BYTES`, except the last."""
    waiting = bytearray()
    async for chunk in chunks:
        waiting += chunk
        if len(waiting) >= CHUNK_BYTES:
            yield bytes(waiting)
            waiting.clear()
    if waiting:
        yield bytes(waiting)
