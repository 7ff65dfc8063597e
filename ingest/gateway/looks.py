"""Looks at a pipeline, shared: one a second, however many watch, and none while nobody does."""

import asyncio
import json
import logging
from collections.abc import AsyncGenerator

import redis

from penstock.errors import BusUnavailable
from penstock.telemetry.live import LiveWatch

log = logging.getLogger(__name__)

EVERY_S = 1.0


class Looks:
    """One pipeline's, for one event loop. Who takes them slowly misses some, and costs no more."""

    def __init__(self, watch: LiveWatch) -> None:
        self._watch = watch
        self._news = asyncio.Event()
        self._frame, self._number, self._num_readers = b"", 0, 0
        self._looking: asyncio.Task[None] | None = None

    async def frames(self) -> AsyncGenerator[bytes, None]:
        """Each look as a server-sent event, from the last one on; `unavailable` where bus or Redis is away."""
        self._num_readers += 1
        if self._looking is None:
            self._number = 0
            self._looking = asyncio.create_task(self._look_on())
        seen = max(0, self._number - 1)
        try:
            while True:
                while self._number <= seen:
                    await self._news.wait()
                seen = self._number
                yield self._frame
        finally:
            self._num_readers -= 1
            if not self._num_readers:
                self.end()

    def end(self) -> None:
        """Look no more."""
        if self._looking is not None:
            self._looking.cancel()
            self._looking = None

    async def _look_on(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + EVERY_S
            self._frame = await asyncio.to_thread(self._look)
            self._number += 1
            self._news.set()
            self._news = asyncio.Event()
            await asyncio.sleep(due - loop.time())

    def _look(self) -> bytes:
        try:
            return _event("look", self._watch.look())
        except BusUnavailable as error:
            return _event("unavailable", {"message": str(error)})
        except redis.RedisError as error:
            return _event("unavailable", {"message": f"Redis: {error}"})
        except Exception:
            log.exception("a look at the pipeline failed")
            return _event("unavailable", {"message": "internal error"})


def _event(name: str, data: object) -> bytes:
    return f"event: {name}\ndata: {json.dumps(data, separators=(',', ':'))}\n\n".encode()
