"""A worker of a region waits until it is known what peers have adopted of it while it was away."""

import logging
import time

from penstock.config.addresses import Addresses
from penstock.config.settings import RegionSettings
from penstock.names import REGION_JOINED_KEY, WORKERS_KEY, Pipeline
from penstock.redis.client import redis_client

log = logging.getLogger(__name__)

LOOK_S = 0.5


def wait_until_joined(addresses: Addresses, settings: RegionSettings, pipeline: Pipeline) -> None:
    """Wait for a permission that is given from now on, by a gateway that has asked this region's peers, or by an
    operator; not at all without peers, or beside a worker that lives: that one has waited. Raise `redis.RedisError`.
    """
    if not settings.peers:
        return
    has_told = False
    with redis_client(addresses.first_url) as client:
        before = client.get(REGION_JOINED_KEY)  # from before the region died, perhaps
        while client.get(REGION_JOINED_KEY) in (None, before):
            beats = [key for key in client.smembers(WORKERS_KEY) if key.startswith(pipeline.worker_prefix.encode())]
            if beats and client.exists(*beats):
                return
            if not has_told:
                log.warning(
                    "waiting until a gateway has asked the regions in PENSTOCK_REGION_PEERS what they have adopted of "
                    "this one; `penstock regions join --force` begins without their answer"
                )
                has_told = True
            time.sleep(LOOK_S)
