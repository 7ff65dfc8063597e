"""A process that counts results, with addresses and failpoints in settings."""

import asyncio

from penstock import failpoints
from penstock.config.addresses import Addresses
from penstock.config.settings import BusSettings, FaultSettings, load_settings
from penstock.ingest.leased_reader import read_forever
from penstock.ingest.metering import UsageMeter


def main() -> None:
    """Until it is killed."""
    failpoints.arm(load_settings(FaultSettings).failpoints)
    asyncio.run(read_forever(UsageMeter(load_settings(Addresses), load_settings(BusSettings))))
