"""Works off the batches of all tenants, in every gateway process.

    1  look     at the marks of batches that are not over, every few seconds and when one was made here
    2  take     the lease of one that nobody has (`lease.py`): of the tenant with the fewest in work here, the oldest
    3  work     it off (`work.py`), and renew the lease meanwhile; where another has it now, leave it at once
    4  release  the lease, after its end, where this gateway stops, or for another tenant's: what is finished is written
                first

Dying after 2 or in 3: the lease runs out, and the next to look goes on from what is written.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Coroutine
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import redis.asyncio
from redis.exceptions import RedisError

from penstock.config.settings import BatchSettings
from penstock.ingest.batch.batches import Batches, Birth
from penstock.ingest.batch.lease import Leases
from penstock.ingest.batch.objects import Objects
from penstock.ingest.batch.store import FileStore
from penstock.ingest.batch.work import ClientOf, Work, make_places
from penstock.ingest.errors import ApiError

log = logging.getLogger(__name__)
MAX_BATCHES = 8
"""That move, at once in one process; the others wait for their turn."""
MAX_HELD = 4 * MAX_BATCHES
"""Those among them that stand still, because no worker serves their models."""
SWEEP_S = 6 * 3600.0


@dataclass
class _Held:
    """A batch in this process's hands."""

    birth: Birth
    work: Work
    task: asyncio.Task[None]
    is_leaving: bool = False
    """It was stopped here, for another to take."""


class BatchRunner:
    """One process's share of the work. `start` and `close` within its event loop."""

    def __init__(
        self, objects: Objects, client: "redis.asyncio.Redis", client_of: ClientOf, settings: BatchSettings
    ) -> None:
        self._objects, self._client_of, self._settings = objects, client_of, settings
        self._batches, self._files = Batches(objects), FileStore(objects)
        self._leases = Leases(client, settings.lease_s)
        self._places = make_places(settings.rows_in_flight)
        self._births: dict[str, Birth] = {}
        """Of the open batches, as far as they were read."""
        self._unreadable = set[str]()
        self._held: dict[str, _Held] = {}
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
        held = [one.task for one in self._held.values()]
        tasks = held if self._looking is None else [self._looking, *held]
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
            except Exception:  # a gateway that looks no more would work off nothing until it is started again
                log.exception("batches: looked for again")
            with suppress(TimeoutError):
                async with asyncio.timeout(self._settings.look_s):
                    await self._news.wait()

    async def _look(self) -> None:
        waiting = [birth for birth in await self._open_births() if birth.id not in self._held]
        while waiting:
            counted = [one for one in self._held.values() if not one.is_leaving]
            num_held = Counter(one.birth.tenant for one in counted)
            birth = min(waiting, key=lambda one: num_held[one.tenant])  # of a tenant's the first, which is the oldest
            waiting.remove(birth)
            giver = None
            if len(counted) >= MAX_HELD or sum(one.work.is_moving for one in counted) >= MAX_BATCHES:
                giver = _giver(counted, num_held, birth.tenant)
                if giver is None:
                    return
            if await self._leases.take(birth.id):
                self._begin(birth)
                if giver is not None:
                    giver.is_leaving = True
                    giver.task.cancel()

    async def _open_births(self) -> list[Birth]:
        """The open batches that can be worked off, the oldest first. Each is read once."""
        open_ids = await self._batches.open_ids()
        found = await asyncio.gather(*map(self._read_birth, open_ids))
        births = [birth for birth in found if birth is not None]
        self._births = {birth.id: birth for birth in births}
        return births

    async def _read_birth(self, batch_id: str) -> Birth | None:
        if batch_id in self._births:
            return self._births[batch_id]
        try:
            birth = await self._batches.open_birth(batch_id)
        except ValueError as error:
            if batch_id not in self._unreadable:
                self._unreadable.add(batch_id)
                log.error("%s is left alone: what the store has of it cannot be read: %s", batch_id, error)
            return None
        self._unreadable.discard(batch_id)
        return birth

    def _begin(self, birth: Birth) -> None:
        work = Work(self._objects, birth, self._client_of, self._places, self._settings)
        task = asyncio.create_task(self._hold(birth, work))
        self._held[birth.id] = _Held(birth, work, task)
        task.add_done_callback(lambda _: self._over(birth.id))

    def _over(self, batch_id: str) -> None:
        del self._held[batch_id]
        self.nudge()

    async def _hold(self, birth: Birth, work: Work) -> None:
        """Work on a batch for as long as its lease is ours."""
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


def _giver(held: list[_Held], num_held: Counter[str], tenant: str) -> _Held | None:
    """The batch that makes way for a tenant's: the youngest of whoever has the most, if that is two more at least.

    With one more, the two would take turns in giving way.
    """
    richest, most = num_held.most_common(1)[0]
    if most < num_held[tenant] + 2:
        return None
    return max((one for one in held if one.birth.tenant == richest), key=lambda one: one.birth.id)


class Desk:
    """Made and closed within the event loop that uses it."""

    def __init__(self, client: "redis.asyncio.Redis", client_of: ClientOf, settings: BatchSettings) -> None:
        self._objects = Objects.open(settings.store_url)
        self.settings = settings
        self.files, self.batches = FileStore(self._objects), Batches(self._objects)
        self.runner = BatchRunner(self._objects, client, client_of, settings)
        self.runner.start()

    async def close(self) -> None:
        """Write what is finished, and leave the batches to others."""
        await self.runner.close()
        self._objects.close()
