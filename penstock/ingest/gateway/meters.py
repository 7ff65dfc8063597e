"""Metering in a gateway: the results of every pipeline that it serves are counted, by this process or by another."""

import asyncio

from penstock.config.addresses import Addresses
from penstock.errors import PenstockError
from penstock.ingest.gateway.models import Models
from penstock.ingest.metering import meter_forever

LOOK_S = 5.0
"""How often it looks for further pipelines."""


async def count_all(models: Models, addresses: Addresses, found: set[str]) -> None:
    """Until cancelled. The names of all pipelines that were seen are put into `found`."""
    counting: dict[str, asyncio.Task[None]] = {}
    try:
        while True:
            found |= await _pipelines(models, addresses)
            for name in found:
                if name not in counting or counting[name].done():
                    own = addresses.model_copy(update={"pipeline": name})
                    counting[name] = asyncio.create_task(meter_forever(own))
            await asyncio.sleep(LOOK_S)
    finally:
        for task in counting.values():
            task.cancel()
        await asyncio.gather(*counting.values(), return_exceptions=True)


async def _pipelines(models: Models, addresses: Addresses) -> set[str]:
    try:
        served = {model.pipeline for model in await models.all()}
    except PenstockError:
        served = set()
    return served | {addresses.pipeline}
