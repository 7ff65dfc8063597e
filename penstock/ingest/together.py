"""Reading several answers at once."""

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any

from penstock.client.sync import Answer


async def together(readings: Sequence[Coroutine[Any, Any, Answer]]) -> list[Answer]:
    """All answers; the first error ends the reading of the others."""
    tasks = [asyncio.create_task(reading) for reading in readings]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
