"""A task of a gateway that searches again and again: for what a gateway that died has left, or for news."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress

from redis.exceptions import RedisError

from penstock.errors import PenstockError, is_failure
from penstock.redis.client import log_outage

log = logging.getLogger(__name__)


class SearchLoop:
    """Searches in intervals, and at once after `search_now`. Call `start` and `close` within the event loop.

    A search that fails is repeated after the interval. The loop ends with `close` alone: otherwise this gateway would
    do nothing of its kind until it is started again.
    """

    def __init__(self, work: str, search: Callable[[], Awaitable[None]], interval_s: float) -> None:
        """`work` is the name of what `search` looks for, for the log."""
        self._work, self._search, self._interval_s = work, search, interval_s
        self._wake_up = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        # Python 3.11 may lose a cancellation in `asyncio.wait_for`, which redis-py calls, so loops look at this too.
        self.is_closing = False

    def start(self) -> None:
        """Start searching."""
        self._task = asyncio.create_task(self._search_forever())

    def search_now(self) -> None:
        """Search at once, because there is something new."""
        self._wake_up.set()

    async def close(self, *others: asyncio.Task[None]) -> None:
        """Stop, and end the tasks that work on what was found."""
        self.is_closing = True
        tasks = [*others, *([] if self._task is None else [self._task])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _search_forever(self) -> None:
        while not self.is_closing:
            self._wake_up.clear()
            try:
                await self._search()
            except (PenstockError, RedisError) as error:
                log_outage(log, f"searching for {self._work} failed, retrying: {error}")
            except BaseException as error:
                if not is_failure(error):
                    raise
                log.exception("searching for %s failed, retrying", self._work)
            with suppress(TimeoutError):
                async with asyncio.timeout(self._interval_s):
                    await self._wake_up.wait()
