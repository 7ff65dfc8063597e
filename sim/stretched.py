"""`python -m sim.stretched [--delays 0 5 15] [--requests 60]`: what zones that are apart cost a request, as JSON.

Three zones have a broker and a Redis server each, and relays between them hand all on so many milliseconds later. The
times are those of the quickest tenth, in milliseconds: until a message is durable, and from its sending until a worker
has read it, where the partition's leader is in the producer's zone and where it is in another one, with the worker in
the producer's zone and in another one, with its rack and without; a settlement; first token and whole answer of a
request to one `auto` worker of the demo model, whose tokens are in a Redis that is as far away.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from confluent_kafka.admin import AdminClient

from penstock.bus.contract import Outgoing, Settlement
from penstock.bus.kafka.bus import KafkaBus
from penstock.client import Client
from penstock.config.settings import BusSettings
from penstock.names import CLASSES, Pipeline
from sim.chaos.checker import count_by_kind
from sim.chaos.history import History
from sim.chaos.runner import ChaosRound, make_stack, run_round
from sim.forked import preload_modules
from sim.kafka_server import SHORT_TIMEOUTS
from sim.scenes import ZONES_ROUND
from sim.waiting import wait_for
from sim.zones import COPY_WAIT_MS, ZonedCluster, ZonedServers, name_rack

ANSWER_TOKENS = 32
CAPACITY = dict.fromkeys(CLASSES, 100)


def count_stretch_lost(seed: int, directory: Path) -> Mapping[str, int]:
    """Lose each of three zones under load, and return how many requests there were, and findings by kind: `lost`,
    `duplicated` and the others.
    """
    outcome = run_round(replace(ZONES_ROUND, seed=seed), directory)
    return {"requests": outcome.requests, **count_by_kind(outcome.findings)}


def find_quick(values: Sequence[float]) -> float:
    """Return the time within which the quickest tenth was: the others waited for what else the machine does, too."""
    return statistics.quantiles(values, n=10)[0] if len(values) > 1 else values[0]


def measure_bus(cluster: ZonedCluster, num: int) -> dict[str, float]:
    """Measure from the first zone, with workers there and in the second one."""
    figures = dict[str, float]()
    for where, zone, rack in (("here", 1, ""), ("there", 2, ""), ("there_with_rack", 2, name_rack(2))):
        pipeline = Pipeline(f"measured-{where.replace('_', '-')}")
        here = KafkaBus(pipeline, cluster.list_addresses(1), BusSettings(partitions=6, replication=3))
        here.create_topics()
        topic, durable_ms, read_ms = pipeline.job_topic("interactive"), defaultdict(list), defaultdict(list)
        known = AdminClient(here.clients).list_topics(topic, 10.0).topics[topic].partitions
        settings = BusSettings(partitions=6, replication=3, rack=rack)
        settle_ms = list[float]()
        publisher = here.create_publisher()
        with KafkaBus(pipeline, cluster.list_addresses(zone), settings).join_group("decode", where) as member:
            for number in range(num):
                begun = time.perf_counter()
                (place,) = publisher.publish([Outgoing(topic, b"x" * 2000, str(number))])
                durable = time.perf_counter()
                while not (found := member.poll(5.0, CAPACITY)):
                    pass
                read = time.perf_counter()
                member.settle([Settlement(one, [Outgoing(pipeline.results_topic, b"y")]) for one in found])
                if number < 10:  # connections are being made
                    continue
                leader = known[int(place.rpartition("@")[2].partition(":")[0])].leader
                whose = "near" if leader == 1 else "far"
                durable_ms[whose].append(1000 * (durable - begun))
                read_ms[whose].append(1000 * (read - begun))
                settle_ms.append(1000 * (time.perf_counter() - read))
        publisher.close()
        for whose in ("near", "far"):
            if where == "here":
                figures[f"durable_{whose}_ms"] = find_quick(durable_ms[whose])
            figures[f"read_{where}_{whose}_ms"] = find_quick(read_ms[whose])
        figures[f"settle_{where}_ms"] = find_quick(settle_ms)
    return figures


def measure_requests(servers: ZonedServers, directory: Path, num: int) -> dict[str, float]:
    """Send requests one after the other, and measure their first tokens and their ends."""
    plan = ChaosRound(0, "kafka", 0.0, 0, 0, 0, 1)
    first_ms, end_ms = list[float](), list[float]()
    with (
        History(directory / "history.jsonl") as history,
        make_stack(plan, directory, history, servers) as stack,
        Client(stack.addresses) as client,
    ):

        def is_ready() -> bool:
            stack.restart_dead()
            return all(map(stack.is_ready, stack.workers))

        wait_for(is_ready, "the worker is ready")
        for number in range(num):
            begun = time.perf_counter()
            events = client.stream(client.submit("The river is long and", max_tokens=ANSWER_TOKENS, seed=number))
            next(events)
            first = time.perf_counter()
            for _ in events:
                pass
            if number >= 5:
                first_ms.append(1000 * (first - begun))
                end_ms.append(1000 * (time.perf_counter() - begun))
    return {"first_token_ms": find_quick(first_ms), "answer_ms": find_quick(end_ms)}


def main() -> None:
    """Measure with each delay, and print a line of JSON for each."""
    parser = argparse.ArgumentParser(prog="python -m sim.stretched", description=__doc__)
    parser.add_argument("--delays", nargs="+", type=float, default=[0.0, 5.0, 15.0], help="milliseconds each way")
    parser.add_argument("--requests", type=int, default=60)
    parser.add_argument("--copy-wait-ms", type=int, default=COPY_WAIT_MS, help="the brokers' replica.fetch.wait.max.ms")
    given = parser.parse_args()
    preload_modules("sim.chaos.runner")
    for delay_ms in given.delays:
        with ExitStack() as exits:
            directory = Path(exits.enter_context(tempfile.TemporaryDirectory(prefix="penstock-zones-")))
            wait_ms = given.copy_wait_ms
            servers = exits.enter_context(ZonedServers(directory, SHORT_TIMEOUTS, delay_ms / 1000, wait_ms))
            told = measure_bus(servers.cluster, given.requests) | measure_requests(servers, directory, given.requests)
        sys.stdout.write(
            json.dumps({"delay_ms": delay_ms, **{name: round(one, 1) for name, one in told.items()}}) + "\n"
        )
        sys.stdout.flush()


if __name__ == "__main__":
    main()
