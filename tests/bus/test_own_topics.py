"""Topics of a tenant's own, on a real Kafka: how they are made, dealt out, followed and taken over."""

import json
from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest
from confluent_kafka.admin import AdminClient, NewPartitions  # type: ignore[attr-defined]

from penstock.bus.contract import FollowedMessage, Outgoing
from penstock.bus.kafka import bus as kafka_bus_module
from penstock.bus.kafka.bus import KafkaBus, describe_own_topics
from penstock.config.settings import BusSettings, RecordSettings
from penstock.errors import SettingsError, TopicsMissing
from penstock.messages import Request, Result, Sampling, decode_message
from penstock.names import Pipeline, Stage, add_tenant, find_shared_topic, split_topic
from sim.line import InProcessPipeline
from sim.waiting import wait_for
from tests.bus.buses import make_messages, publish_messages
from tests.commands import Terminal

NUM_PARTITIONS = 4


@pytest.fixture
def bus(kafka: str, pipeline: Pipeline) -> KafkaBus:
    made = KafkaBus(pipeline, kafka, BusSettings(partitions=NUM_PARTITIONS))
    made.create_topics()
    return made


def test_names_are_literal_and_begin_with_no_other_tenants(pipeline: Pipeline) -> None:
    """Also where tenants' names do, and a topic of another pipeline is nobody's."""
    names = [topic for tenant in ("acme", "acme.eu", "acm") for topic in pipeline.list_own_topics(tenant)]
    assert not [(one, other) for one in names for other in names if one != other and one.startswith(other)]
    for topic in pipeline.all_topics():
        own = add_tenant(topic, "acme")
        assert split_topic(own) == (topic, ".t-822b33ad87c148a0")
        assert find_shared_topic(topic) == topic
        for no_own in (f"{topic}.t-822b33ad87c148a", f"{topic}.t-822B33AD87C148A0", f"{topic}-822b33ad87c148a0"):
            assert split_topic(no_own) == (no_own, "")
    other = Pipeline(f"{pipeline.name}2")
    assert pipeline.find_own_topics([*names, *other.list_own_topics("acme"), *pipeline.all_topics()]) == sorted(names)


def test_a_tenant_gets_six_topics_and_too_many_tenants_are_refused(
    bus: KafkaBus, pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = pipeline.list_own_topics("acme")
    assert own[-2:] == [add_tenant(pipeline.request_topic(one), "acme") for one in ("batch", "interactive")]
    assert describe_own_topics(bus) == ("", [])
    assert bus.create_topics("acme") == own
    assert bus.create_topics("acme") == []
    assert describe_own_topics(bus) == (f"tenants: 1, partitions: {4 * NUM_PARTITIONS + 2}", [])
    monkeypatch.setattr(kafka_bus_module, "MAX_TENANTS_WITH_TOPICS", 1)
    assert bus.create_topics("acme") == []
    with pytest.raises(SettingsError, match="pipeline of their own"):
        bus.create_topics("another")
    assert sorted(bus.find_own_topics()) == sorted(own)


def test_doctor_names_a_missing_topic_and_one_with_other_partitions(
    bus: KafkaBus, pipeline: Pipeline, redis_url: str, terminal: Terminal
) -> None:
    bus.create_topics("acme")
    servers = {
        "PENSTOCK_PIPELINE": pipeline.name, "PENSTOCK_KAFKA": bus.bootstrap, "PENSTOCK_STREAM_URL": redis_url
    }  # fmt: skip
    assert "ok    own topics          tenants: 1, partitions: 18" in terminal("doctor", **servers).stdout
    admin, shared = AdminClient(bus.clients), pipeline.job_topic("batch")
    admin.create_partitions([NewPartitions(shared, NUM_PARTITIONS + 1)])[shared].result()
    gone, uneven = add_tenant(pipeline.results_topic, "acme"), add_tenant(shared, "acme")
    admin.delete_topics([gone])[gone].result()
    expected = [f"{gone} is missing", f"{uneven} has 4 partitions, and {shared} 5"]
    wait_for(lambda: describe_own_topics(bus)[1] == expected, "both are seen")
    report = terminal("doctor", **servers)
    assert all(f"fail  own topics          {one}" in report.stdout for one in expected)


def test_there_are_no_own_topics_without_shared_ones(bus: KafkaBus, pipeline: Pipeline) -> None:
    with pytest.raises(SettingsError, match="has no topics yet"):
        KafkaBus(Pipeline(f"{pipeline.name}-none"), bus.bootstrap, bus.settings).create_topics("acme")


def test_a_member_reads_the_same_partitions_of_all_topics_and_finds_new_ones(bus: KafkaBus, pipeline: Pipeline) -> None:
    """So that what is placed in a partition of the one is placed in the others. No member has all of a tenant's."""
    topic = pipeline.request_topic("interactive")
    own = [add_tenant(topic, tenant) for tenant in ("acme", "beta")]
    bus.create_topics("acme")
    with bus.join_group("prefill", "a") as one, bus.join_group("prefill", "b") as other:

        def are_dealt(topics: list[str]) -> bool:
            for member in (one, other):
                numbers = dict[str, set[str]]()
                for part in member.list_partitions():
                    name, _, number = part.rpartition(":")
                    numbers.setdefault(name, set()).add(number)
                halves = list(numbers.values())
                if numbers.keys() != {*topics} or len(halves[0]) != 2 or any(half != halves[0] for half in halves):
                    return False
            return True

        wait_for(lambda: are_dealt([topic, own[0]]), "both members have half of each topic")
        bus.create_topics("beta")
        wait_for(lambda: are_dealt([topic, *own]), "they found the new tenant's topics")


def test_who_sends_before_the_topics_are_there_is_told(bus: KafkaBus, pipeline: Pipeline) -> None:
    own = add_tenant(pipeline.request_topic("interactive"), "acme")
    message = Outgoing(own, b"{}", "k", {"penstock-tenant": "acme"})
    with closing(bus.create_publisher()) as publisher:
        with pytest.raises(TopicsMissing, match="penstock topics create --tenant acme"):
            publisher.publish([message])
        bus.create_topics("acme")

        def is_sent() -> bool:
            try:
                return bool(publisher.publish([message]))
            except TopicsMissing:
                return False

        wait_for(is_sent, "the publisher sees the topics")
    assert [one.value for one in bus.read_all(own)] == [b"{}"], "nothing that was refused was written"


def test_a_follower_reads_all_tenants_and_goes_on_where_it_was(bus: KafkaBus, pipeline: Pipeline) -> None:
    results = pipeline.results_topic
    bus.create_topics("acme")
    publish_messages(bus, [*make_messages(results, 3), *make_messages(add_tenant(results, "acme"), 2)])

    def read(after: dict[str, str], count: int) -> list[FollowedMessage]:
        found: list[FollowedMessage] = []
        with closing(bus.follow_topic(results, after)) as follower:
            while len(found) < count:
                found += follower.read_messages(0.2)
            found += follower.read_messages(0.2)
        return found

    first = read({}, 5)
    assert sorted(one.message.topic for one in first if one.message) == [
        *[results] * 3,
        *[add_tenant(results, "acme")] * 2,
    ]
    after = {one.partition: one.offset for one in first}
    assert sum(name.startswith(".t-") for name in after) == 1
    publish_messages(bus, [Outgoing(add_tenant(results, "acme"), b"new", "k")])
    assert [one.message.value for one in read(after, 1) if one.message] == [b"new"]


@pytest.mark.parametrize("stage", ["prefill", "decode"])
def test_a_request_that_is_taken_over_stays_in_its_tenants_topics(
    stage: Stage, make_line: Callable[..., InProcessPipeline], pipeline: Pipeline
) -> None:
    """Its new worker has no delivery. Another tenant's request in these topics is refused there."""
    line = make_line("kafka", record=RecordSettings(lease_s=0.4))
    line.bus.create_topics("acme")
    requests, results, jobs = (
        add_tenant(topic, "acme")
        for topic in (pipeline.request_topic("interactive"), pipeline.results_topic, pipeline.job_topic("interactive"))
    )
    sampling = Sampling(max_tokens=6, temperature=0, ignore_eos=True)
    asked = Request(id="stays", tenant="acme", prompt="In the beginning", sampling=sampling)
    line.publish_bytes(asked.encode(), asked.id, requests)
    record = line.make_record()

    def has_written(topic: str, count: int) -> bool:
        line.prefill.run_once()
        line.decode.run_once()
        return len(line.bus.read_all(topic)) >= count

    def has_ended() -> bool:
        line.prefill.run_once()
        line.decode.run_once()
        status = record.read_status("stays")
        return status is not None and status.stage == "end"

    if stage == "decode":
        while not line.bus.read_all(jobs):
            line.prefill.run_once()
    silent = line.silence_worker(stage)
    wait_for(has_ended, "its end", 0)
    silent.close()
    wait_for(lambda: has_written(results, 1), "its result", 0)
    stranger = asked.model_copy(update={"id": "strange", "tenant": "beta"})
    line.publish_bytes(stranger.encode(), stranger.id, requests)
    wait_for(lambda: has_written(results, 2), "the other one's", 0)
    found = {one.id: one for one in (decode_message(Result, one.value) for one in line.bus.read_all(results))}
    assert (found["stays"].finish_reason, len(found["stays"].token_ids)) == ("length", 6)
    assert found["strange"].error is not None
    assert found["strange"].error.code == "invalid_request"
    shared: list[Any] = [one for topic in pipeline.all_topics() for one in line.bus.read_all(topic)]
    assert shared == []
    assert {json.loads(one.value)["id"] for one in line.bus.read_all(jobs)} == {"stays", "strange"}
