"""Works off the batches of all tenants, in every gateway process.

    1  look     at the marks of batches that are not over, every few seconds and when one was made here
    2  take     the lease of one that nobody has (`lease.py`)
    3  work     it off (`work.py`), and renew the lease meanwhile; where another has it now, leave it at once
    4  release  the lease, after its end or where this gateway stops: what is finished is written first

Dying after 2 or in 3: the lease runs out, and the next to look goes on from what is written.
"""

import asyncio
import logging
import time
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any

import redis.asyncio
from redis.exceptions import RedisError

from ingest.batch.batches import Batches, Birth
from ingest.batch.lease import Leases
from ingest.batch.objects import Objects
from ingest.batch.store import FileStore
from ingest.batch.work import ClientOf, Work
from ingest.gateway.errors import ApiError
from penstock.settings import BatchSettings

log = logging.getLogger(__name__)
MAX_BATCHES = 8
"""At once in one process; the others wait for their turn, the oldest first."""
SWEEP_S = 6 * 3600.0


class BatchRunner:
    """One process's share of the work. `start` and `close` within its event loop."""

    def __init__(
        self, objects: Objects, client: "redis.asyncio.Redis", client_of: ClientOf, settings: BatchSettings
    ) -> None:
        self._objects, self._client_of, self._settings = objects, client_of, settings
        self._batches, self._files = Batches(objects), FileStore(objects)
        self._leases = Leases(client, settings.lease_s)
        self._room = asyncio.Semaphore(settings.rows_in_flight)
        self._working: dict[str, asyncio.Task[None]] = {}
        self._news = asyncio.Event()
        self._looking: asyncio.Task[None] | None = None
        self._swept_at = time.monotonic()

    def start(self) -> None:
        """Begin to look."""
        self._looking = asyncio.create_task(self._look_on())

    def nudge(self) -> None:
        """There is a new batch: look now."""
        self._news.set()

    async def close(self) -> None:
        """Stop; what is finished is written, and the batches are others'."""
        tasks = [task for task in (self._looking, *self._working.values()) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _look_on(self) -> None:
        while True:
            self._news.clear()
            try:
                await self._look()
                if time.monotonic() > self._swept_at + SWEEP_S:
                    self._swept_at = time.monotonic()
                    await self._files.sweep()
            except (ApiError, RedisError) as error:
                log.warning("batches: %s", error)
            with suppress(TimeoutError):
                async with asyncio.timeout(self._settings.look_s):
                    await self._news.wait()

    async def _look(self) -> None:
        for batch_id in await self._batches.open_ids():
            if len(self._working) >= MAX_BATCHES:
                return
            if batch_id in self._working:
                continue
            birth = await self._batches.open_birth(batch_id)
            if birth is not None and await self._leases.take(batch_id):
                task = asyncio.create_task(self._hold(birth))
                self._working[batch_id] = task
                task.add_done_callback(lambda _, done=batch_id: self._over(done))  # type: ignore[misc]

    def _over(self, batch_id: str) -> None:
        del self._working[batch_id]
        self.nudge()

    async def _hold(self, birth: Birth) -> None:
        """Work on a batch for as long as its lease is ours."""
        work = Work(self._objects, birth, self._client_of, self._room, self._settings)
        working = asyncio.create_task(self._logged(work.run(), birth))
        try:
            while not working.done():
                await asyncio.wait((working,), timeout=self._settings.lease_s / 3)
                if await self._leases.lost(birth.id):
                    log.warning("%s is another gateway's now", birth.id)
                    return
        finally:
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)
            with suppress(ApiError):
                await work.flush()
            await self._leases.release(birth.id)

    async def _logged(self, work: Coroutine[Any, Any, None], birth: Birth) -> None:
        """Work, and if it fails leave it for a while: the batch is still there."""
        try:
            await work
        except Exception:
            log.exception("%s: its work is tried again", birth.id)
            await asyncio.sleep(self._settings.look_s)
