"""The store of pictures: each file once, under the SHA-256 of its bytes.

    penstock:picture:<digest>      in the stream server that the digest chooses
    pictures/<digest>              in the object store: files that are large, or for which Redis has no place

1  who takes a request in stores its pictures      2  the request is produced      3  workers read them

A crash between 1 and 2 leaves a file that nobody asks for, until its time is over. A file lives as long as the record
of a request that waits: in Redis each reading renews that, in the object store each storing. What is gone is
`PictureGone` for its request, and comes back when somebody sends the picture again.

Nobody asks for a digest over HTTP: who does not have a picture's file cannot name it.
"""

import asyncio
import hashlib
import time
from collections.abc import Awaitable

import redis

from penstock.config.addresses import Addresses
from penstock.config.settings import PictureSettings, RecordSettings
from penstock.errors import PictureGone, StorageUnavailable
from penstock.names import picture_key
from penstock.objects import ObjectStorage, T
from penstock.ops.eviction import measure_share
from penstock.redis.client import redis_client, translate_outages
from penstock.redis.servers import Sharded
from penstock.sealing import has_tenant_keys, mask_digest, open_bytes, seal_bytes

FOLDER = "pictures"
MAX_REDIS_SHARE = 0.5
"""Where more of a stream server's memory is in use, pictures go to the object store: records and logs come first."""
MAX_OBJECT_S = 10.0
"""How long the object store may take for one file: a worker's thread that is silent for a minute ends its process."""


class PictureStore:
    """The pictures of a pipeline's requests. Its methods wait for servers, and may be called by several threads.

    They raise `BusUnavailable` and `StorageUnavailable`.
    """

    def __init__(
        self, addresses: Addresses, objects: ObjectStorage, settings: PictureSettings, record: RecordSettings
    ) -> None:
        self._servers: Sharded[redis.Redis] = Sharded.from_urls(addresses.stream_url, redis_client)
        self._objects = objects
        self._max_redis_bytes, self._keep_s = settings.redis_max_kb * 1024, round(record.pending_keep_s)

    def put(self, data: bytes, tenant: str = "default") -> str:
        """Store a picture's file, and return its digest. The file of a tenant with a key is that tenant's own."""
        found = hashlib.sha256(data).hexdigest()
        digest, data = mask_digest(tenant, found), bytes(seal_bytes("picture", tenant, found, data))
        server = self._servers[digest]
        with translate_outages():
            if len(data) <= self._max_redis_bytes and (measure_share(server) or 0.0) < MAX_REDIS_SHARE:
                server.set(picture_key(digest), data, ex=self._keep_s)
                return found
        asyncio.run(limit_time(self._objects.put(f"{FOLDER}/{digest}", data), MAX_OBJECT_S))
        return found

    def get(self, digest: str, tenant: str = "default") -> bytes:
        """Return a picture's file. Raises `PictureGone`, also for one that was damaged."""
        stored = self._read_stored(mask_digest(tenant, digest))
        if stored is None and has_tenant_keys():  # stored before its tenant had a key
            stored = self._read_stored(digest)
        data = None if stored is None else open_bytes("picture", tenant, digest, stored)
        if data is None or hashlib.sha256(data).hexdigest() != digest:
            raise PictureGone(f"the picture {digest[:12]}… is not in the store any more: send it again")
        return data

    def _read_stored(self, name: str) -> bytes | None:
        with translate_outages():
            data = self._servers[name].getex(picture_key(name), ex=self._keep_s)
        if not isinstance(data, bytes):
            data = asyncio.run(limit_time(self._objects.get(f"{FOLDER}/{name}"), MAX_OBJECT_S))
        return data

    def close(self) -> None:
        """Close the connections. The object store is its owner's."""
        for server in self._servers.parts:
            server.close()


async def limit_time(call: Awaitable[T], max_s: float) -> T:
    """Return what a store answers. Raises `StorageUnavailable` if it takes longer."""
    try:
        async with asyncio.timeout(max_s):
            return await call
    except TimeoutError:
        raise StorageUnavailable(f"the file store did not answer for {max_s:g} seconds") from None


async def delete_old_pictures(objects: ObjectStorage, record: RecordSettings) -> int:
    """Delete the pictures of the object store whose time is over; return how many."""
    over_s = time.time() - record.pending_keep_s
    names = [name for stored_s, name in await objects.list_by_age(FOLDER) if stored_s < over_s]
    num_deleted = 0
    for path in (f"{FOLDER}/{name}" for name in names):
        stored_s = await objects.get_time(path)  # it may have been stored again meanwhile
        if stored_s is not None and stored_s < over_s:
            await objects.delete(path)
            num_deleted += 1
    return num_deleted
