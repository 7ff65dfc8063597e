"""Checks how many copies there are of what a pipeline keeps in Kafka and in Redis, and over which zones they lie."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.findings import Finding

RACK_SELECTOR = "org.apache.kafka.common.replica.RackAwareReplicaSelector"
INTERNAL_TOPICS = ("__consumer_offsets", "__transaction_state")
"""The brokers' own topics without which workers neither read nor settle."""
MAX_COPY_WAIT_MS = 50
"""How much later a copy may know what its readers may have. Brokers have 500 by default, as much as a first token."""
WANTED_COPIES = 3
"""Of so many copies one may be lost, and two still acknowledge each write."""
MAX_REPLICA_LAG_S = 10
"""By how much a replica of Redis may be behind, as `min-replicas-max-lag` has it."""
REASSIGN = "spread them with kafka-reassign-partitions.sh"


@dataclass
class KafkaCopies:
    """What brokers tell of themselves and of their copies."""

    racks: dict[int, str] = field(default_factory=dict)
    """The rack of each broker that lives; empty if it has none."""
    selectors: dict[int, str] = field(default_factory=dict)
    """The `replica.selector.class` of each broker that lives; empty if it has none."""
    waits_ms: dict[int, int] = field(default_factory=dict)
    """The `replica.fetch.wait.max.ms` of each broker that lives."""
    holders: dict[str, dict[int, Sequence[int]]] = field(default_factory=dict)
    """The brokers that have a copy of each partition, by topic."""
    min_in_sync: dict[str, int] = field(default_factory=dict)
    """How many copies must have a write before it is acknowledged, by topic."""


def read_kafka_copies(clients: Mapping[str, Any], topics: Sequence[str], *, with_selectors: bool) -> KafkaCopies:
    """Ask the brokers about the pipeline's topics and their own, as far as these exist and are shown to this user.

    Raise `BusUnavailable`, also where the user may not see the brokers' settings, which `with_selectors` asks for.
    """
    from confluent_kafka import KafkaError, KafkaException, TopicCollection
    from confluent_kafka.admin import AdminClient, ResourceType  # type: ignore[attr-defined]

    from penstock.bus.kafka.admin_lookups import read_settings
    from penstock.bus.kafka.client import BROKER_TIMEOUT_S, bus_errors

    admin, told = AdminClient(dict(clients)), KafkaCopies()
    hidden = (KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError.TOPIC_AUTHORIZATION_FAILED)
    with bus_errors():
        nodes = admin.describe_cluster(request_timeout=BROKER_TIMEOUT_S).result(BROKER_TIMEOUT_S).nodes
        told.racks = {node.id: node.rack or "" for node in nodes}
        asked = admin.describe_topics(TopicCollection([*topics, *INTERNAL_TOPICS]), request_timeout=BROKER_TIMEOUT_S)
        for topic, future in asked.items():
            try:
                partitions = future.result(BROKER_TIMEOUT_S).partitions
                (settings,) = read_settings(admin, ResourceType.TOPIC, [topic]).values()
            except KafkaException as raised:
                if raised.args[0].code() not in hidden:
                    raise
                continue
            told.holders[topic] = {one.id: [node.id for node in one.replicas] for one in partitions}
            told.min_in_sync[topic] = int(settings["min.insync.replicas"])
        for broker in told.racks if with_selectors else ():  # each is asked about itself alone
            (settings,) = read_settings(admin, ResourceType.BROKER, [str(broker)]).values()
            told.selectors[broker] = settings["replica.selector.class"]
            told.waits_ms[broker] = int(settings["replica.fetch.wait.max.ms"])
    return told


def check_kafka_copies(told: KafkaCopies, own_rack: str) -> Iterator[Finding]:
    """Check that one broker, and one rack where there are some, may be lost. Fewer than three brokers promise nothing.

    `own_rack`: where this process is, as its settings say.
    """
    racks = sorted({rack for rack in told.racks.values() if rack})
    if len(told.racks) >= WANTED_COPIES:
        wrong = [one for topic in told.holders for one in _check_topic(told, topic)]
        where = f"in racks {', '.join(racks)}" if racks else "and no broker has a rack"
        yield from wrong or [Finding("ok", "copies", f"{WANTED_COPIES} or more of each partition, {where}")]
        if racks and (lacking := [broker for broker, rack in told.racks.items() if not rack]):
            found = f"{_list('broker', lacking)} without a rack: new partitions are not spread over racks"
            yield Finding("note", "racks", found, "set broker.rack on each broker, and restart one after the other")
    if not own_rack:
        return
    if own_rack not in racks:
        found = f"PENSTOCK_BUS_RACK={own_rack}, and the brokers' racks are {', '.join(racks) or 'not set'}"
        yield Finding("note", "racks", found, "set it to the broker.rack of the brokers that are in the same zone")
    elif lacking := [broker for broker, selector in told.selectors.items() if selector != RACK_SELECTOR]:
        found = f"{_list('broker', lacking)} let nobody read from a nearer copy: PENSTOCK_BUS_RACK does nothing there"
        yield Finding("note", "racks", found, f"set replica.selector.class={RACK_SELECTOR} on each broker")
    elif lacking := [broker for broker, wait_ms in told.waits_ms.items() if wait_ms > MAX_COPY_WAIT_MS]:
        found = f"{_list('broker', lacking)} learn up to {max(told.waits_ms.values())} ms late what may be read there"
        advice = f"set replica.fetch.wait.max.ms={MAX_COPY_WAIT_MS} or less on each broker, or no PENSTOCK_BUS_RACK"
        yield Finding("note", "racks", found, advice)
    else:
        yield Finding("ok", "racks", f"this process is in {own_rack}, and reads from the copies there")


def _check_topic(told: KafkaCopies, topic: str) -> Iterator[Finding]:
    holders, min_in_sync = told.holders[topic], told.min_in_sync[topic]
    least = min(map(len, holders.values()), default=WANTED_COPIES)
    advice = f"kafka-configs.sh --alter --entity-type topics --entity-name {topic} --add-config min.insync.replicas=2"
    if least < WANTED_COPIES:
        few = [number for number, brokers in holders.items() if len(brokers) < WANTED_COPIES]
        found = f"{topic}: {_list('partition', few)} with {least} of {WANTED_COPIES} copies"
        yield Finding("fail", "copies", found, f"{REASSIGN}; new topics: PENSTOCK_BUS_REPLICATION=3")
    elif min_in_sync < 2:
        found = f"{topic}: one broker acknowledges a write alone, and may be lost with it"
        yield Finding("fail", "copies", found, advice)
    elif min_in_sync >= least:
        found = f"{topic}: a write needs {min_in_sync} of {least} copies: nothing is accepted without one broker"
        yield Finding("fail", "copies", found, advice)
    if least < 2:
        return
    one_rack = [  # of a broker that is away the rack is not known
        number
        for number, brokers in holders.items()
        if len({told.racks.get(broker, "") or broker for broker in brokers}) < 2
    ]
    if one_rack:
        found = f"{topic}: {_list('partition', one_rack)} with all copies in one rack, and lost with it"
        yield Finding("fail", "copies", found, REASSIGN)


def _list(what: str, numbers: Sequence[int]) -> str:
    return f"{what}{'s' * (len(numbers) > 1)} {', '.join(map(str, sorted(numbers)))}"


def check_redis_copies(what: str, replication: Mapping[str, Any], *, has_sentinels: bool) -> Iterator[Finding]:
    """Check the replicas of a stream server by its `INFO replication`. A server without any promises nothing."""
    replicas = [value for name, value in replication.items() if name.startswith("slave") and isinstance(value, dict)]
    behind = [one for one in replicas if one.get("state") != "online" or int(one.get("lag", 0)) > MAX_REPLICA_LAG_S]
    refuses = "min_slaves_good_slaves" in replication  # it is told where min-replicas-to-write is set
    if not replicas and not has_sentinels:
        return
    if len(behind) == len(replicas):
        advice = "start a replica in another zone: see its log where it runs"
        yield Finding("fail", f"{what}: copies", "no replica follows: with the server its data is away", advice)
    elif behind:
        found = f"{len(behind)} of {len(replicas)} replicas do not follow: " + ", ".join(
            f"{one.get('ip')}:{one.get('port')} ({one.get('state')})" for one in behind
        )
        yield Finding("note", f"{what}: copies", found, "see their logs")
    elif len(replicas) > 1 and not refuses:
        found = f"{len(replicas)} replicas follow; cut off from them it takes writes that are lost later"
        advice = f"min-replicas-to-write 1, min-replicas-max-lag {MAX_REPLICA_LAG_S} on each server"
        yield Finding("note", f"{what}: copies", found, advice)
    elif len(replicas) == 1 and refuses:
        found = "one replica, and min-replicas-to-write: after a failover nothing is accepted"
        yield Finding("note", f"{what}: copies", found, "add a second replica, or set min-replicas-to-write 0")
    else:
        yield Finding("ok", f"{what}: copies", f"replicas that follow: {len(replicas)}")
