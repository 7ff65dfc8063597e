"""The live state of a pipeline, read once a second however many clients watch, and not at all while none does.

A caller with an API key is a tenant. It sees neither the workers, their names and hosts, nor how much all tenants
together use. Only a gateway that asks for no keys shows everything.
"""

import asyncio
import json
import logging
from collections.abc import AsyncGenerator

import redis

from penstock.errors import BusUnavailable
from penstock.ops.live import Json, LiveWatch

log = logging.getLogger(__name__)

LOOK_INTERVAL_S = 1.0
KEEP_ALIVE_S = 5.0
"""A comment is sent after so long without a state, as brokers that answer late make a look take long."""
PRIVATE_FIELDS = ("workers", "lost", "scaling", "tiers", "rates", "account", "regions")
"""The fields that a tenant does not see."""


class LiveBroadcast:
    """The live state of one pipeline, for one event loop. A client that reads slowly misses some states."""

    def __init__(self, watch: LiveWatch) -> None:
        self._watch = watch
        self._new_frames = asyncio.Event()
        self._frames, self._number, self._num_readers = (b"", b""), 0, 0
        """The whole snapshot, and what a tenant sees of it."""
        self._looking_task: asyncio.Task[None] | None = None

    async def read_frames(self, *, is_whole: bool) -> AsyncGenerator[bytes, None]:
        """Yield each state as a server-sent event, from the last one on; `unavailable` in an outage."""
        self._num_readers += 1
        if self._looking_task is None:
            self._number = 0
            self._looking_task = asyncio.create_task(self._look_forever())
        seen = max(0, self._number - 1)
        try:
            while True:
                while self._number <= seen:
                    try:
                        async with asyncio.timeout(KEEP_ALIVE_S):
                            await self._new_frames.wait()
                    except TimeoutError:
                        yield b": the state is still being read\n\n"
                seen = self._number
                yield self._frames[0 if is_whole else 1]
        finally:
            self._num_readers -= 1
            if not self._num_readers:
                self.stop()

    def stop(self) -> None:
        """Stop reading the state."""
        if self._looking_task is not None:
            self._looking_task.cancel()
            self._looking_task = None

    async def _look_forever(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + LOOK_INTERVAL_S
            self._frames = await asyncio.to_thread(self._make_frames)
            self._number += 1
            self._new_frames.set()
            self._new_frames = asyncio.Event()
            await asyncio.sleep(due - loop.time())

    def _make_frames(self) -> tuple[bytes, bytes]:
        try:
            snapshot = self._watch.read_latest()
            return _encode_event("look", snapshot), _encode_event("look", summarize_snapshot(snapshot))
        except BusUnavailable as error:
            why = str(error)
        except redis.RedisError as error:
            why = f"Redis: {error}"
        except Exception:
            log.exception("a snapshot of the pipeline failed")
            why = "internal error"
        public = _encode_event("unavailable", {"message": "the pipeline cannot be reached now"})
        return _encode_event("unavailable", {"message": why}), public


def summarize_snapshot(snapshot: Json) -> Json:
    """Return what a tenant sees of a state. Reasons name workers and hosts, so they are left out of its health."""
    shown = {name: value for name, value in snapshot.items() if name not in PRIVATE_FIELDS}
    return shown | {"health": {"state": snapshot["health"]["state"], "reasons": []}}


def _encode_event(name: str, data: object) -> bytes:
    return f"event: {name}\ndata: {json.dumps(data, separators=(',', ':'))}\n\n".encode()
