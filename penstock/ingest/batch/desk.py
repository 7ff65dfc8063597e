"""Files and batches as a gateway has them: the store, and the runner over it."""

import redis.asyncio

from penstock.config.settings import BatchSettings
from penstock.ingest.batch.batches import Batches
from penstock.ingest.batch.objects import Objects
from penstock.ingest.batch.runner import BatchRunner
from penstock.ingest.batch.store import FileStore
from penstock.ingest.batch.work import ClientOf


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
