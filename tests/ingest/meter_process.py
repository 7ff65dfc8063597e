"""A process that counts results: `python -m tests.ingest.meter_process`, with addresses and failpoints in settings."""

import asyncio

from ingest.metering import meter_forever
from penstock import failpoints
from penstock.settings import Addresses, FaultSettings, load

if __name__ == "__main__":
    failpoints.arm(load(FaultSettings).failpoints)
    asyncio.run(meter_forever(load(Addresses)))
