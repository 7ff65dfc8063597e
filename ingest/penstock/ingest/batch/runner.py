"""Works on the batches of all tenants, in every gateway process.

    1  look     at the marks of open batches, every few seconds and when a batch was created here
    2  take     the lease of one that no gateway has: of the tenant with the fewest batches here, the oldest
    3  work     on it (`work.py`), and renew the lease meanwhile; stop at once if another gateway has it
    4  release  the lease when the batch has ended, when this gateway stops, or in favour of another tenant's batch.
                Finished rows are written first

After a crash following 2 or in 3 the lease runs out, and the next gateway to look goes on from what is written.
"""

import asyncio
import logging
import time
import uuid
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass

import redis.asyncio
from redis.exceptions import RedisError

from penstock.config.settings import BatchSettings
from penstock.errors import is_failure
from penstock.ingest.batch.answer import FindPipeline, Pipelines
from penstock.ingest.batch.batches import BatchSpec, BatchStore
from penstock.ingest.batch.store import FileStore
from penstock.ingest.batch.work import BatchWork
from penstock.ingest.regions.lending import Lender
from penstock.ingest.search_loop import SearchLoop
from penstock.ingest.webhooks import Webhooks
from penstock.names import batch_lease_key
from penstock.objects import ObjectStorage
from penstock.redis.scripts import RELEASE_LEASE, RENEW_LEASE

log = logging.getLogger(__name__)
MAX_MOVING_BATCHES = 8
"""How many batches that make progress one process works on at once; the others wait."""
MAX_HELD_BATCHES = 4 * MAX_MOVING_BATCHES
"""How many it holds at once, including those that stand still because no worker serves their models."""
EXPIRY_CHECK_S = 6 * 3600.0


class _BatchLeases:
    """The leases of batches in Redis: one gateway works on a batch, and another goes on when that one died.

    They only save work. Two gateways may work on one batch after a pause of one of them. They ask for the same
    requests and write separate parts, and one of them ends the batch.
    """

    def __init__(self, client: "redis.asyncio.Redis", lease_s: float) -> None:
        self._client, self._ms = client, round(lease_s * 1000)
        self._holder = uuid.uuid4().hex

    async def acquire_lease(self, batch_id: str) -> bool:
        """Take or renew a batch's lease. Return False if another gateway has it. Raises `RedisError` in an outage."""
        return bool(await RENEW_LEASE.run_async(self._client, [batch_lease_key(batch_id)], [self._holder, self._ms]))

    async def is_lost(self, batch_id: str) -> bool:
        """Renew a lease and return whether another gateway has it. In an outage no gateway can take it."""
        try:
            return not await self.acquire_lease(batch_id)
        except RedisError:
            return False

    async def release_lease(self, batch_id: str) -> None:
        """Give a lease back, so that another gateway can take it at once. In an outage it runs out by itself."""
        with suppress(RedisError):
            await RELEASE_LEASE.run_async(self._client, [batch_lease_key(batch_id)], [self._holder])


@dataclass
class _HeldBatch:
    """A batch that this process works on."""

    spec: BatchSpec
    work: BatchWork
    task: asyncio.Task[None]
    is_leaving: bool = False
    """Whether it was stopped here, for another batch."""


class BatchRunner:
    """Works on batches in one process. Call `start` and `close` within its event loop."""

    def __init__(
        self,
        objects: ObjectStorage,
        client: "redis.asyncio.Redis",
        find_pipeline: FindPipeline,
        settings: BatchSettings,
        webhooks: Webhooks | None = None,
        lender: Lender | None = None,
    ) -> None:
        self._objects, self._settings, self._webhooks = objects, settings, webhooks
        self._batches, self._files = BatchStore(objects), FileStore(objects)
        self._leases = _BatchLeases(client, settings.lease_s)
        self._pipelines = Pipelines(find_pipeline, settings.rows_in_flight, lender)
        self._specs: dict[str, BatchSpec] = {}
        """The specifications of open batches, as far as they were read."""
        self._unreadable = set[str]()
        self._held: dict[str, _HeldBatch] = {}
        self._loop = SearchLoop("abandoned batches", self._search, settings.look_s)
        self._expiry_checked_at = time.monotonic()

    def start(self) -> None:
        """Start looking for batches."""
        self._loop.start()

    def look_now(self) -> None:
        """Look for batches at once, because one was created."""
        self._loop.search_now()

    async def close(self) -> None:
        """Stop. Finished rows are written, and other gateways can take the batches."""
        await self._loop.close(*(one.task for one in self._held.values()))

    async def _search(self) -> None:
        await self._take_batches()
        if time.monotonic() > self._expiry_checked_at + EXPIRY_CHECK_S:
            self._expiry_checked_at = time.monotonic()
            await self._files.delete_expired()

    async def _take_batches(self) -> None:
        waiting = [spec for spec in await self._list_open_specs() if spec.id not in self._held]
        while waiting:
            counted = [one for one in self._held.values() if not one.is_leaving]
            num_held = Counter(one.spec.tenant for one in counted)
            spec = min(waiting, key=lambda one: num_held[one.tenant])  # of a tenant's the first, which is the oldest
            waiting.remove(spec)
            victim = None
            if len(counted) >= MAX_HELD_BATCHES or sum(one.work.is_moving for one in counted) >= MAX_MOVING_BATCHES:
                victim = _choose_batch_to_release(counted, num_held, spec.tenant)
                if victim is None:
                    return
            if await self._leases.acquire_lease(spec.id):
                self._start_work(spec)
                if victim is not None:
                    victim.is_leaving = True
                    victim.task.cancel()

    async def _list_open_specs(self) -> list[BatchSpec]:
        """Return the open batches that can be worked on, the oldest first. Each is read once."""
        open_ids = await self._batches.list_open_ids()
        found = await asyncio.gather(*map(self._read_spec, open_ids))
        specs = [spec for spec in found if spec is not None]
        self._specs = {spec.id: spec for spec in specs}
        return specs

    async def _read_spec(self, batch_id: str) -> BatchSpec | None:
        if batch_id in self._specs:
            return self._specs[batch_id]
        try:
            spec = await self._batches.find_open_spec(batch_id)
        except ValueError as error:
            if batch_id not in self._unreadable:
                self._unreadable.add(batch_id)
                log.error("%s is skipped: its specification in the store cannot be read: %s", batch_id, error)
            return None
        self._unreadable.discard(batch_id)
        return spec

    def _start_work(self, spec: BatchSpec) -> None:
        work = BatchWork(self._objects, spec, self._pipelines, self._settings, self._webhooks)
        task = asyncio.create_task(self._work_under_lease(spec, work))
        self._held[spec.id] = _HeldBatch(spec, work, task)
        task.add_done_callback(lambda _: self._forget_batch(spec.id))

    def _forget_batch(self, batch_id: str) -> None:
        del self._held[batch_id]
        self.look_now()

    async def _work_under_lease(self, spec: BatchSpec, work: BatchWork) -> None:
        """Work on a batch while this process has its lease."""
        working = asyncio.create_task(self._work_or_log(work, spec))
        try:
            while not working.done() and not self._loop.is_closing:
                await asyncio.wait((working,), timeout=self._settings.lease_s / 3)
                if await self._leases.is_lost(spec.id):
                    log.warning("another gateway works on %s now", spec.id)
                    return
        finally:
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)
            await self._leases.release_lease(spec.id)

    async def _work_or_log(self, work: BatchWork, spec: BatchSpec) -> None:
        """Work; after an error wait a while, as the batch is taken again then."""
        try:
            await work.run()
        except BaseException as error:
            if not is_failure(error):
                raise
            log.exception("working on %s failed, retrying", spec.id)
            await asyncio.sleep(self._settings.look_s)


def _choose_batch_to_release(held: list[_HeldBatch], num_held: Counter[str], tenant: str) -> _HeldBatch | None:
    """Return a batch to stop in favour of a tenant's: the youngest of the tenant with the most, if it has two more.

    With a difference of one the two tenants would replace each other in turn.
    """
    busiest_tenant, num_most = num_held.most_common(1)[0]
    if num_most < num_held[tenant] + 2:
        return None
    return max((one for one in held if one.spec.tenant == busiest_tenant), key=lambda one: one.spec.id)


class BatchService:
    """The store of files and batches, and the runner over it. Created and closed within its event loop."""

    def __init__(
        self,
        client: "redis.asyncio.Redis",
        find_pipeline: FindPipeline,
        settings: BatchSettings,
        webhooks: Webhooks,
        home: str = "",
        lender: Lender | None = None,
    ) -> None:
        """`home` is the region in which files and batches are made, if there are regions; `lender` knows the others."""
        self.objects = ObjectStorage.open(settings.store_url)
        self.settings = settings
        self.files, self.batches = FileStore(self.objects, home), BatchStore(self.objects, home)
        self.runner = BatchRunner(self.objects, client, find_pipeline, settings, webhooks, lender)
        self.runner.start()

    async def close(self) -> None:
        """Write finished rows, and leave the batches to other gateways."""
        await self.runner.close()
        self.objects.close()
