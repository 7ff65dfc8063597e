"""Looks at a pipeline, shared: one a second, however many watch, and none while nobody does.

Who has an API key is a tenant: its look leaves out the workers, their names and hosts, and how much all tenants
together do. Only a gateway that asks for no keys shows the whole.
"""

import asyncio
import json
import logging
from collections.abc import AsyncGenerator

import redis

from penstock.errors import BusUnavailable
from penstock.ops.live import Json, LiveWatch

log = logging.getLogger(__name__)

EVERY_S = 1.0
PRIVATE = ("workers", "lost", "tiers", "rates")
"""What a tenant is not shown of a look."""


class Looks:
    """One pipeline's, for one event loop. Who takes them slowly misses some, and costs no more."""

    def __init__(self, watch: LiveWatch) -> None:
        self._watch = watch
        self._news = asyncio.Event()
        self._frames, self._number, self._num_readers = (b"", b""), 0, 0
        """The whole look, and what a tenant sees of it."""
        self._looking: asyncio.Task[None] | None = None

    async def frames(self, *, is_whole: bool) -> AsyncGenerator[bytes, None]:
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
                yield self._frames[0 if is_whole else 1]
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
            self._frames = await asyncio.to_thread(self._look)
            self._number += 1
            self._news.set()
            self._news = asyncio.Event()
            await asyncio.sleep(due - loop.time())

    def _look(self) -> tuple[bytes, bytes]:
        try:
            look = self._watch.read_latest()
            return _event("look", look), _event("look", summary_of(look))
        except BusUnavailable as error:
            why = str(error)
        except redis.RedisError as error:
            why = f"Redis: {error}"
        except Exception:
            log.exception("a look at the pipeline failed")
            why = "internal error"
        public = _event("unavailable", {"message": "the pipeline cannot be reached now"})
        return _event("unavailable", {"message": why}), public


def summary_of(look: Json) -> Json:
    """What a tenant sees of a look: reasons name workers and hosts, so its health is the state alone."""
    shown = {name: value for name, value in look.items() if name not in PRIVATE}
    return shown | {"health": {"state": look["health"]["state"], "reasons": []}}


def _event(name: str, data: object) -> bytes:
    return f"event: {name}\ndata: {json.dumps(data, separators=(',', ':'))}\n\n".encode()
