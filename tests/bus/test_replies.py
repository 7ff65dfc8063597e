"""Results go to the topics of their requesters, where these are allowed and take them; else to `results`, with why."""

import contextlib
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import pytest
import redis
from confluent_kafka.admin import AdminClient, NewTopic  # type: ignore[attr-defined]

from penstock.bus.contract import MAX_MESSAGE_BYTES, Bus, Delivery, Outgoing, Settlement, as_text
from penstock.bus.kafka.bus import KafkaBus
from penstock.bus.replies import MAX_HEADER_BYTES, find_reply, pick_reply_headers
from penstock.bus.streams.client import decode_entry
from penstock.config.settings import BusSettings
from penstock.errors import ReplyRefused
from penstock.messages import Result, decode_message
from penstock.names import (
    CORRELATION_HEADER,
    REPLY_PARTITION_HEADER,
    REPLY_REFUSED_HEADER,
    REPLY_TO_HEADER,
    REPLY_TOPIC_HEADER,
    TENANT_HEADER,
    Pipeline,
)
from penstock.testing.bus import MemoryBus
from penstock.worker.settler import Settler, Settling
from sim.waiting import wait_for
from tests.bus.buses import SETTINGS, make_bus, publish_messages, take_deliveries
from tests.bus.test_settler import shrink_topic

CORRELATION = as_text(bytes(range(120, 136)))
"""Bytes that are no text, as Spring's template sends them."""


@dataclass
class Requesters:
    """A bus with topics of requesters, whose names begin with `prefix`; the tenant `shop` may have replies there."""

    bus: Bus
    prefix: str
    address: str

    def create_topic(self, name: str, partitions: int = 1, config: dict[str, str] | None = None) -> str:
        """Create a topic, and return its name."""
        topic = f"{self.prefix}{name}"
        if isinstance(self.bus, MemoryBus):
            self.bus.add_reply_topic(topic)
        elif isinstance(self.bus, KafkaBus):
            admin = AdminClient(self.bus.clients)
            admin.create_topics([NewTopic(topic, partitions, 1, config=config or {})])[topic].result(60)
            wait_for(lambda: topic in admin.list_topics(timeout=60).topics, "the broker knows it")
        else:
            with redis.Redis.from_url(self.address) as client:
                client.xgroup_create(topic, "requester", id="0", mkstream=True)
        return topic

    def read_replies(self, topic: str) -> list[Outgoing]:
        """Return the replies in a topic."""
        if isinstance(self.bus, MemoryBus | KafkaBus):
            return self.bus.read_all(topic)
        with redis.Redis.from_url(self.address) as client:
            entries = client.xrange(topic)
        return [Outgoing(topic, *decode_entry(fields)) for _, fields in entries]


@pytest.fixture
def requesters(request: pytest.FixtureRequest, bus_kind: str, pipeline: Pipeline) -> Requesters:
    prefix = f"shop-{uuid.uuid4().hex[:8]}."
    settings = SETTINGS.model_copy(update={"reply_topics": f"shop={prefix}"})
    if bus_kind == "memory":
        memory, address = MemoryBus(pipeline), ""
        memory.reply_prefixes = settings.find_reply_prefixes()
        made: Bus = memory
    else:
        address = request.getfixturevalue("kafka" if bus_kind == "kafka" else "redis_url")
        made = make_bus(bus_kind, pipeline, address, settings)
    made.create_topics()
    return Requesters(made, prefix, address)


def make_result(delivery: Delivery, results_topic: str, text: str = "an answer") -> Outgoing:
    tenant = delivery.headers.get(TENANT_HEADER, "default")
    result = Result(id=delivery.key or "", tenant=tenant, finish_reason="stop", text=text, token_ids=[1, 2])
    return Outgoing(results_topic, result.encode(), delivery.key, {TENANT_HEADER: tenant})


def ask(topic: str, tenant: str = "shop", **more: str) -> dict[str, str]:
    return {REPLY_TO_HEADER: topic, CORRELATION_HEADER: CORRELATION, TENANT_HEADER: tenant, **more}


class Settle(Protocol):
    def __call__(self, asked: Mapping[str, Mapping[str, str]], text: str = "an answer") -> None: ...


@contextlib.contextmanager
def join_settler(bus: Bus, pipeline: Pipeline) -> Iterator[Settle]:
    """Yield what settles a result for each request, by its id, all in one call, and waits until all are settled."""
    topic = pipeline.job_topic("interactive")
    with bus.join_group("decode", "a") as member:
        settler = Settler(member, pipeline)

        def settle(asked: Mapping[str, Mapping[str, str]], text: str = "an answer") -> None:
            publish_messages(bus, [Outgoing(topic, b"job", name, dict(headers)) for name, headers in asked.items()])
            taken, settled = take_deliveries(member, len(asked)), list[bool]()
            settlements = [Settlement(one, [make_result(one, pipeline.results_topic, text)]) for one in taken]
            settler._pending.put(None)  # its thread ends with what it is given at once
            for one in settlements:
                settler._open[one.delivery.address] += 1
            settler._settle_batch([Settling(one) for one in settlements])
            settled = [is_settled for _, is_settled in settler.collect()]
            assert settled == [True] * len(asked)

        yield settle
        assert member.count_held() == 0


def read_outcomes(bus: Bus, pipeline: Pipeline) -> dict[str, tuple[str, str]]:
    """Return for each request where its text went, and why it is in `results`; empty texts for none."""
    found = dict[str, tuple[str, str]]()
    for one in bus.read_all(pipeline.results_topic):
        assert one.key is not None
        assert one.key not in found, "one result"
        found[one.key] = one.headers.get(REPLY_TO_HEADER, ""), one.headers.get(REPLY_REFUSED_HEADER, "")
        result = decode_message(Result, one.value)
        assert (result.id, bool(result.text)) == (one.key, REPLY_TO_HEADER not in one.headers)
        assert result.token_ids == ([] if REPLY_TO_HEADER in one.headers else [1, 2])
    return found


def test_each_result_is_where_it_is_wanted_or_among_all_with_the_reason(
    requesters: Requesters, pipeline: Pipeline
) -> None:
    bus, good = requesters.bus, requesters.create_topic("good")
    own = pipeline.request_topic("interactive")
    asked = {
        "plain": {TENANT_HEADER: "shop"},
        "good": ask(good),
        "spring": {REPLY_TOPIC_HEADER: good, CORRELATION_HEADER: CORRELATION, TENANT_HEADER: "shop"},
        "missing": ask(f"{requesters.prefix}missing"),
        "another's": ask(good, tenant="crm"),
        "ours": ask(own),
        "ours by key": ask(pipeline.stream_key(own)),
        "a long id": ask(good, **{CORRELATION_HEADER: "x" * (MAX_HEADER_BYTES + 1)}),
        "no number": {REPLY_TOPIC_HEADER: good, REPLY_PARTITION_HEADER: "0", TENANT_HEADER: "shop"},
    }
    ids = {name: f"r{number}" for number, name in enumerate(asked)}
    with join_settler(bus, pipeline) as settle:
        settle({ids[name]: headers for name, headers in asked.items()})
    outcomes = read_outcomes(bus, pipeline)
    found = {name: outcomes[ids[name]] for name in asked}
    assert found["plain"] == ("", "")
    assert found["good"] == found["spring"] == (good, "")
    assert {name for name, (sent, why) in found.items() if why and not sent} == set(asked) - {"plain", "good", "spring"}
    assert "PENSTOCK_BUS_REPLY_TOPICS" in found["another's"][1]
    replies = {one.key: one for one in requesters.read_replies(good)}
    assert replies.keys() == {ids["good"], ids["spring"]}
    for one in replies.values():
        assert one.headers[CORRELATION_HEADER] == CORRELATION
        assert decode_message(Result, one.value).text == "an answer"
    assert len(bus.read_all(own)) == 0, "no result is a request"


def make_kafka_requesters(kafka: str, pipeline: Pipeline) -> Requesters:
    prefix = f"shop-{uuid.uuid4().hex[:8]}."
    bus = KafkaBus(
        pipeline, kafka, BusSettings(partitions=1, transaction_timeout_s=20.0, reply_topics=f"shop={prefix}")
    )
    bus.create_topics()
    return Requesters(bus, prefix, kafka)


def test_partition_size_and_key_of_a_reply_on_kafka(kafka: str, pipeline: Pipeline) -> None:
    made = make_kafka_requesters(kafka, pipeline)
    three, small = made.create_topic("three", 3), made.create_topic("small", config={"max.message.bytes": "2000"})
    compacted = made.create_topic("compacted", config={"cleanup.policy": "compact"})
    alone = made.create_topic("alone", config={"min.insync.replicas": "2"})
    spring = {REPLY_TOPIC_HEADER: three, TENANT_HEADER: "shop"}
    asked = {
        "r0": spring | {REPLY_PARTITION_HEADER: as_text((2).to_bytes(4, "big"))},
        "r1": spring | {REPLY_PARTITION_HEADER: as_text((3).to_bytes(4, "big"))},
        "r2": ask(small),
        "r3": ask(compacted),
        "r4": ask(alone),
    }
    with join_settler(made.bus, pipeline) as settle:
        settle(asked, "x" * 2000)
    outcomes = read_outcomes(made.bus, pipeline)
    assert {name: sent for name, (sent, _) in outcomes.items()} == {
        "r0": three, "r1": "", "r2": "", "r3": compacted, "r4": ""
    }  # fmt: skip
    assert "too few replicas in sync" in outcomes["r4"][1]
    assert "no partition 3" in outcomes["r1"][1]
    assert "max.message.bytes is 2,000" in outcomes["r2"][1]
    with contextlib.closing(made.bus.follow_topic(three, {})) as follower:
        assert [one.partition for one in follower.read_messages(60.0)] == ["2"]


def test_small_replies_to_a_topic_with_small_batches_all_go_there(kafka: str, pipeline: Pipeline) -> None:
    made = make_kafka_requesters(kafka, pipeline)
    small = made.create_topic("small", config={"max.message.bytes": "3000"})
    asked = {f"r{number}": ask(small) for number in range(20)}
    with join_settler(made.bus, pipeline) as settle:
        settle(asked, "x" * 500)
    assert set(read_outcomes(made.bus, pipeline).values()) == {(small, "")}


@pytest.mark.parametrize("how", ["deleted", "smaller"])
def test_a_reply_that_the_brokers_refuse_stops_none_of_the_others(kafka: str, pipeline: Pipeline, how: str) -> None:
    """The topic changes after the worker has looked at it."""
    made = make_kafka_requesters(kafka, pipeline)
    bus, good, bad = made.bus, made.create_topic("good"), made.create_topic("bad")
    assert isinstance(bus, KafkaBus)
    with join_settler(bus, pipeline) as settle:
        settle({"r0": ask(good), "r1": ask(bad)}, "x" * 2000)
        assert read_outcomes(bus, pipeline) == {"r0": (good, ""), "r1": (bad, "")}
        if how == "deleted":
            admin = AdminClient(bus.clients)
            admin.delete_topics([bad])[bad].result(60)
        else:
            shrink_topic(bus, bad, "1000")
        settle({"r2": ask(good), "r3": ask(bad), "r4": {TENANT_HEADER: "shop"}}, "x" * 2000)
    outcomes = read_outcomes(bus, pipeline)
    assert (outcomes["r2"], outcomes["r4"]) == ((good, ""), ("", ""))
    assert outcomes["r3"][1].startswith(f"{bad}: ")


def test_a_partition_that_the_client_knows_is_none_is_refused_as_a_reply(kafka: str, pipeline: Pipeline) -> None:
    made = make_kafka_requesters(kafka, pipeline)
    one = made.create_topic("one")
    publish_messages(made.bus, [Outgoing(pipeline.job_topic("interactive"), b"job", name) for name in ("r0", "r1")])
    with made.bus.join_group("decode", "a") as member:
        first, second = take_deliveries(member, 2)
        result, reply = make_result(first, pipeline.results_topic), Outgoing(one, b"reply", is_reply=True)
        member.settle([Settlement(first, [result, replace(reply, partition=0)])])
        settlement = Settlement(second, [make_result(second, pipeline.results_topic), replace(reply, partition=3)])
        with pytest.raises(ReplyRefused) as refused:
            member.settle([settlement])
        assert refused.value.reasons.keys() == {one}
        member.settle([replace(settlement, outputs=settlement.outputs[:1])])
    assert len(read_outcomes(made.bus, pipeline)) == 2


def test_a_reply_that_is_too_large_by_its_correlation_id_leaves_the_answer_whole(pipeline: Pipeline) -> None:
    bus = MemoryBus(pipeline)
    bus.create_topics()
    bus.reply_prefixes = {"shop": ("shop.",)}
    bus.add_reply_topic("shop.good")
    asked = {"r0": ask("shop.good", **{CORRELATION_HEADER: "x" * MAX_HEADER_BYTES})}
    size = make_result(
        Delivery("", "", b"", "r0", asked["r0"], "interactive", 0.0), pipeline.results_topic, ""
    ).num_bytes
    with join_settler(bus, pipeline) as settle:
        settle(asked, "x" * (MAX_MESSAGE_BYTES - size - 100))
    (result,) = bus.read_all(pipeline.results_topic)
    assert len(decode_message(Result, result.value).text) == MAX_MESSAGE_BYTES - size - 100


def test_headers_of_a_request_that_its_job_has() -> None:
    headers = {REPLY_TO_HEADER: "a", CORRELATION_HEADER: CORRELATION, "other": "x", REPLY_PARTITION_HEADER: "y" * 2000}
    picked = pick_reply_headers(headers)
    assert picked == {
        REPLY_TO_HEADER: "a", CORRELATION_HEADER: CORRELATION, REPLY_PARTITION_HEADER: "y" * (MAX_HEADER_BYTES + 1)
    }  # fmt: skip
    reply, wrong = find_reply(picked, Outgoing("results", b"", "r0"))
    assert reply is not None
    assert (reply.topic, reply.key, wrong) == ("a", "r0", "")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("shop", "is not TENANT=PREFIX"),
        ("shop=", "is not TENANT=PREFIX"),
        ("a b=x.", "is not TENANT=PREFIX"),
        ("shop=penstock.demo.", "own names"),
        ("shop=__", "own names"),
        ("a=x.,b=x.y.", "could be those of"),
        ("a=x.,*=x.y.", "could be those of"),
    ],
)
def test_bad_prefixes_are_refused(given: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        BusSettings(reply_topics=given)


def test_prefixes_by_tenant() -> None:
    found = BusSettings(reply_topics="shop=shop.a., shop=shop.b.,crm=crm.,*=all.").find_reply_prefixes()
    assert found == {"shop": ("shop.a.", "shop.b."), "crm": ("crm.",), "*": ("all.",)}
