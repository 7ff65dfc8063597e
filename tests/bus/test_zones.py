"""One cluster over three zones: who reads from the nearest copy, and what `penstock doctor` says about copies."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from penstock.bus.contract import Outgoing
from penstock.bus.kafka.bus import KafkaBus
from penstock.config.settings import BusSettings
from penstock.findings import Finding
from penstock.local.valkey import ValkeyServer
from penstock.names import Pipeline
from penstock.ops.copies import RACK_SELECTOR, KafkaCopies, check_kafka_copies, check_redis_copies
from penstock.redis.client import redis_client
from sim.servers import serve_server
from sim.waiting import wait_for
from sim.zones import ZONES, ZonedCluster, name_rack
from tests.bus.buses import publish_messages, take_deliveries
from tests.commands import Terminal

NUM_MESSAGES, MESSAGE_BYTES = 60, 50_000
TOTAL_BYTES = NUM_MESSAGES * MESSAGE_BYTES


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ZonedCluster]:
    yield from serve_server(ZonedCluster(tmp_path_factory.mktemp("zones")))


def count_far_bytes(cluster: ZonedCluster, zone: int) -> int:
    """How much the clients of a zone were sent by brokers of other zones."""
    return sum(relay.num_reply_bytes for (there, _), relay in cluster.relays.items() if there == zone)


def make_bus(cluster: ZonedCluster, pipeline: Pipeline, zone: int, rack: str) -> KafkaBus:
    return KafkaBus(pipeline, cluster.list_addresses(zone), BusSettings(partitions=6, replication=3, rack=rack))


def fill_topic(cluster: ZonedCluster, pipeline: Pipeline, topic: str) -> None:
    """Spread messages over all partitions of a topic, a third of which each broker leads."""
    bus = make_bus(cluster, pipeline, ZONES[0], "")
    bus.create_topics()
    leaders = AdminClient(bus.clients).list_topics(topic, 10.0).topics[topic].partitions.values()
    assert {one.leader for one in leaders} == set(ZONES)
    publish_messages(bus, [Outgoing(topic, bytes(MESSAGE_BYTES), str(number)) for number in range(NUM_MESSAGES)])


@pytest.mark.proof
def test_a_worker_reads_from_the_copy_in_its_zone(cluster: ZonedCluster, pipeline: Pipeline) -> None:
    """Without a rack most of it comes from the two other zones."""
    fill_topic(cluster, pipeline, pipeline.job_topic("interactive"))
    far_bytes = dict[str, int]()
    for rack in ("", name_rack(2)):
        before = count_far_bytes(cluster, 2)
        with make_bus(cluster, pipeline, 2, rack).join_group("decode", f"in-{rack}") as member:
            take_deliveries(member, NUM_MESSAGES)
            far_bytes[rack] = count_far_bytes(cluster, 2) - before
    assert far_bytes[""] > TOTAL_BYTES / 2
    assert far_bytes[name_rack(2)] < TOTAL_BYTES / 10


def test_a_follower_of_results_reads_from_the_copy_in_its_zone(cluster: ZonedCluster, pipeline: Pipeline) -> None:
    fill_topic(cluster, pipeline, pipeline.results_topic)
    before, count = count_far_bytes(cluster, 3), 0
    with closing(make_bus(cluster, pipeline, 3, name_rack(3)).follow_topic(pipeline.results_topic, {})) as follower:
        while count < NUM_MESSAGES:
            count += len(follower.read_messages(0.5))
    assert count_far_bytes(cluster, 3) - before < TOTAL_BYTES / 10


def test_reading_to_the_end_asks_the_leaders(cluster: ZonedCluster, pipeline: Pipeline) -> None:
    """A copy learns later than its leader what was acknowledged: whoever reads to its end could miss the last ones."""
    fill_topic(cluster, pipeline, pipeline.results_topic)
    before = count_far_bytes(cluster, 2)
    assert len(make_bus(cluster, pipeline, 2, name_rack(2)).read_all(pipeline.results_topic)) == NUM_MESSAGES
    assert count_far_bytes(cluster, 2) - before > TOTAL_BYTES / 2


def test_doctor_tells_of_copies_and_racks(
    cluster: ZonedCluster, pipeline: Pipeline, redis_url: str, terminal: Terminal
) -> None:
    servers = {
        "PENSTOCK_PIPELINE": pipeline.name, "PENSTOCK_KAFKA": cluster.bootstrap, "PENSTOCK_STREAM_URL": redis_url
    }  # fmt: skip
    jobs = pipeline.job_topic("batch")
    admin = AdminClient({"bootstrap.servers": cluster.bootstrap, "log_level": 0})
    admin.create_topics([NewTopic(jobs, 2, replica_assignment=[[1], [2]])])[jobs].result()
    make_bus(cluster, pipeline, 1, "").create_topics()
    told = terminal("doctor", **servers, PENSTOCK_BUS_RACK="zone-9").stdout
    assert f"fail  copies              {jobs}: partitions 0, 1 with 1 of 3 copies" in told
    assert told.count("fail  copies") == 1
    assert "note  racks               PENSTOCK_BUS_RACK=zone-9, and the brokers' racks are zone-1, zone-2, zo" in told

    admin.delete_topics([jobs])[jobs].result()
    wait_for(lambda: jobs not in admin.list_topics(timeout=10.0).topics, "it is gone")
    make_bus(cluster, pipeline, 1, "").create_topics()
    told = terminal("doctor", **servers, PENSTOCK_BUS_RACK="zone-1").stdout
    assert "ok    copies              3 or more of each partition, in racks zone-1, zone-2, zone-3" in told
    assert "ok    racks               this process is in zone-1, and reads from the copies there" in told


RACKS = {1: "a", 2: "a", 3: "b"}


@pytest.mark.parametrize(
    ("told", "own_rack", "found"),
    [
        (
            KafkaCopies(RACKS, {}, {}, {"t": {0: [1, 2, 3]}}, {"t": 2}),
            "",
            ("ok", "3 or more of each partition, in racks"),
        ),
        (KafkaCopies({1: ""}, {}, {}, {"t": {0: [1]}}, {"t": 1}), "", None),  # one broker promises nothing
        (
            KafkaCopies({1: "", 2: "", 3: ""}, {}, {}, {"t": {0: [1, 2, 3]}}, {"t": 2}),
            "",
            ("ok", "no broker has a rack"),
        ),
        (KafkaCopies(RACKS, {}, {}, {"t": {0: [1, 2, 3]}}, {"t": 1}), "", ("fail", "acknowledges a write alone")),
        (KafkaCopies(RACKS, {}, {}, {"t": {0: [1, 2, 3]}}, {"t": 3}), "", ("fail", "needs 3 of 3 copies")),
        (KafkaCopies({**RACKS, 4: "a"}, {}, {}, {"t": {7: [1, 2, 4]}}, {"t": 2}), "", ("fail", "partition 7 with all")),
        # The rack of a broker that is away is not known.
        (KafkaCopies({**RACKS, 4: "a"}, {}, {}, {"t": {7: [1, 2, 9]}}, {"t": 2}), "", ("ok", "3 or more")),
        (KafkaCopies({**RACKS, 3: ""}), "", ("note", "broker 3 without a rack")),
        (KafkaCopies({1: "a"}, {1: ""}), "a", ("note", "broker 1 let nobody read from a nearer copy")),
        (KafkaCopies({1: "a"}, {1: RACK_SELECTOR}, {1: 50}), "a", ("ok", "this process is in a")),
        (KafkaCopies({1: "a"}, {1: RACK_SELECTOR}, {1: 500}), "a", ("note", "broker 1 learn up to 500 ms late")),
    ],
)
def test_what_is_found_about_kafka(told: KafkaCopies, own_rack: str, found: tuple[str, str] | None) -> None:
    findings = list(check_kafka_copies(told, own_rack))
    if found is None:
        assert findings == []
    else:
        assert [one for one in findings if one.state == found[0] and found[1] in one.detail]
        assert all(one.state == "ok" or one.advice for one in findings)


def find_redis_copies(port: int, *, has_sentinels: bool = False) -> list[Finding]:
    with redis_client(f"redis://127.0.0.1:{port}/0") as client:
        return list(check_redis_copies("Redis", client.info("replication"), has_sentinels=has_sentinels))


def test_what_is_found_about_redis(tmp_path: Path) -> None:
    with ValkeyServer(tmp_path / "first") as first:
        assert find_redis_copies(first.port) == []
        (alone,) = find_redis_copies(first.port, has_sentinels=True)
        assert alone.state == "fail"

        def has_followers(num: int, state: str) -> bool:
            return [one.state for one in find_redis_copies(first.port)] == [state] and f"{num} " in (
                f"{find_redis_copies(first.port)[0].detail} "
            )

        with (
            redis_client(first.url) as client,
            ValkeyServer(tmp_path / "second", replica_of=first.port),
        ):
            wait_for(lambda: has_followers(1, "ok"), "it has a replica")
            client.config_set("min-replicas-to-write", "1")
            (one,) = find_redis_copies(first.port)
            assert one.state == "note"
            assert "after a failover nothing is accepted" in one.detail
            with ValkeyServer(tmp_path / "third", replica_of=first.port):
                wait_for(lambda: has_followers(2, "ok"), "it has two")
                client.config_set("min-replicas-to-write", "0")
                (two,) = find_redis_copies(first.port)
                assert two.advice.startswith("min-replicas-to-write 1")
