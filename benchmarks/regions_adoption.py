"""The part `adoption` of `benchmarks.regions`: a region dies with many requests, and its peer answers the open ones.

Two regions, `eu` and `us`, with a Kafka each and MirrorMaker between them, `ROUND_TRIP_S` apart. The requests of `eu`
are written by the product's publisher, and results for most of them. While more are written all of `eu` is killed, and
an operator says `penstock regions adopt eu` in `us`, which has one worker with the demo model.

    rpo_s                   the greatest age of the newest copied heartbeat while requests are written, and at the kill
    rto_s                   from the operator's word until the last open request has its result
    adoption_published_s    from the operator's word until the command has ended
    adoption_kept, adoption_open    requests in the copy, and those without a result
    adoption_lost           those of them that have none within `LIMIT_S`
"""

import contextlib
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock.bus.connect import connect_bus
from penstock.bus.contract import Outgoing
from penstock.client.core import prepare_message
from penstock.config.settings import BusSettings
from penstock.ingest.regions.copies import read_copy_state
from penstock.messages import Request, Result, Sampling, encode_request, now_s
from penstock.names import Pipeline
from penstock.redis.client import redis_client
from sim.chaos.adopted_region import ROUND_TRIP_S, read_copied_ids, read_results
from sim.chaos.system import PIPELINE
from sim.chaos.two_regions import Region, wait_tending
from sim.mirror_maker import MirroredKafkas

LIMIT_S = 600.0
ANSWER_TOKENS = 8
CHUNK = 1000
PACE_S = 0.1
"""Between ten requests and the next, while the copy's age is looked at."""


@dataclass(frozen=True)
class AdoptionExtent:
    """How much is played."""

    num_kept: int
    num_open: int
    num_looks: int
    """How often the copy's age is looked at while requests are written."""


FULL, QUICK = AdoptionExtent(100_000, 1000, 100), AdoptionExtent(5000, 200, 30)


class Writer:
    """Writes requests to the Kafka of `eu`, and results."""

    def __init__(self, eu: Region) -> None:
        self._bus, self._pipeline = connect_bus(eu.stack.addresses, BusSettings()), Pipeline(PIPELINE)
        self._publisher = self._bus.create_publisher()

    def write(self, ids: Sequence[str], open_ids: frozenset[str] = frozenset()) -> None:
        """Write requests, and the results of all that do not stay open."""
        answered = [one for one in ids if one not in open_ids]
        self._publisher.publish([*map(self._make_request, ids), *map(self._make_result, answered)])

    def _make_request(self, request_id: str) -> Outgoing:
        sampling = Sampling(max_tokens=ANSWER_TOKENS, temperature=0.0)
        request = Request(id=request_id, prompt=f"{request_id}: In the beginning", sampling=sampling)
        return prepare_message(self._pipeline, encode_request(request))[1]

    def _make_result(self, request_id: str) -> Outgoing:
        result = Result(id=request_id, text="God created the heaven", finish_reason="length")
        return Outgoing(self._pipeline.results_topic, result.encode(), request_id)

    def close(self) -> None:
        """Free the connections."""
        self._publisher.close()


@contextlib.contextmanager
def open_regions(directory: Path) -> Iterator[tuple[MirroredKafkas, Region, Region]]:
    """Yield both regions with MirrorMaker between them; `eu` has a gateway and no workers."""
    way_s = ROUND_TRIP_S / 2
    with contextlib.ExitStack() as exits:
        kafkas = exits.enter_context(MirroredKafkas(directory / "kafka", way_s))
        eu = Region("eu", directory, 0, kafka=kafkas.eu.bootstrap, delay_s=way_s)
        us = Region("us", directory, 1, kafka=kafkas.us.bootstrap, copies="eu", delay_s=way_s)
        for region, peer in ((eu, us), (us, eu)):
            exits.callback(region.stop)
            region.start(peer)
        us.stack.wait_until_ready(LIMIT_S)
        yield kafkas, eu, us


def measure_adoption(extent: AdoptionExtent) -> dict[str, float]:
    """Let `eu` die, and return the figures."""
    with tempfile.TemporaryDirectory(prefix="penstock-adoption-") as name, open_regions(Path(name)) as opened:
        kafkas, eu, us = opened
        ids = [f"kept-{number}" for number in range(extent.num_kept)]
        open_ids = frozenset(ids[:: extent.num_kept // extent.num_open])
        with contextlib.closing(Writer(eu)) as writer, redis_client(us.stack.addresses.first_url) as client:

            def read_age_s() -> float:
                return read_copy_state(client, Pipeline(PIPELINE), "eu").age_s or 0.0

            def is_copied() -> bool:
                return read_copy_state(client, Pipeline(PIPELINE), "eu").num_open == len(open_ids)

            for first in range(0, len(ids), CHUNK):
                writer.write(ids[first : first + CHUNK], open_ids)
            print(f"adoption: {len(ids):,} requests are written", flush=True)
            wait_tending(is_copied, [us], LIMIT_S)
            ages_s = list[float]()
            for look in range(extent.num_looks):
                writer.write([f"while-{look}-{number}" for number in range(10)])
                ages_s.append(read_age_s())
                time.sleep(PACE_S)
            eu.kill()
            kafkas.eu.kill()
            died_s, begun_s = now_s(), time.monotonic()
            told = us.command("adopt", "eu")
            assert told.returncode == 0, told.stderr
            published_s = time.monotonic() - begun_s
            ages_s.append(read_age_s() - (now_s() - died_s))
        requests, results = read_copied_ids(us)
        wanted, found = requests - results, set[str]()
        assert open_ids <= wanted, "all that was to stay open is copied, and open"
        while not wanted <= found and time.monotonic() < begun_s + LIMIT_S:
            found = {result.id for result in read_results(us)}
        figures = {
            "rpo_s": max(ages_s), "rto_s": time.monotonic() - begun_s, "adoption_published_s": published_s,
            "adoption_kept": len(requests), "adoption_open": len(wanted), "adoption_lost": len(wanted - found),
        }  # fmt: skip
        print(f"adoption: {figures}", flush=True)
        return figures
