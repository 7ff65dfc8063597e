"""A process that counts results, with addresses and failpoints in settings."""

import asyncio

from penstock import failpoints
from penstock.config.addresses import Addresses
from penstock.config.settings import BusSettings, FaultSettings, load_settings
from penstock.ingest.metering import meter_forever


def main() -> None:
    """Until it is killed."""
    failpoints.arm(load_settings(FaultSettings).failpoints)
    asyncio.run(meter_forever(load_settings(Addresses), load_settings(BusSettings)))
