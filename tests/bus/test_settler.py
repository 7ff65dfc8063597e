"""Settlements whose reply is lost, on both buses, and those that the brokers do not take."""

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import pytest

from penstock.bus.contract import Bus, Member, Outgoing, Settlement
from penstock.bus.kafka.bus import KafkaBus
from penstock.errors import BusUnavailable, RequestTooLarge
from penstock.messages import Job, Result
from penstock.names import REASON_HEADER, TRUNCATED_HEADER, Pipeline, Stage
from penstock.worker.settler import Settler, Settling
from sim.waiting import wait_for
from tests.bus.buses import SETTINGS, list_values, make_bus, publish_messages, take_deliveries
from tests.bus.test_doctor import set_topic_settings
from tests.draws import mark_some
from tests.gateways import ScriptedPipeline


class Forgetful:
    """A member whose first settlement succeeds, though its reply is lost."""

    current_problem, slowness = "", 1

    def __init__(self, member: Member) -> None:
        self._member, self._has_forgotten = member, False

    def settle(self, settlements: Sequence[Settlement]) -> None:
        self._member.settle(settlements)
        if not self._has_forgotten:
            self._has_forgotten = True
            raise BusUnavailable("the reply is lost")


@pytest.mark.parametrize(("is_held", "is_again"), mark_some([(True, False), (False, True)], pytest.mark.proof))
def test_no_job_goes_out_twice_under_one_name_though_the_reply_is_lost(
    bus: Bus, is_held: bool, is_again: bool, pipeline: Pipeline
) -> None:
    """If the lost delivery shows that the job is out, it is not published again; otherwise under another name."""
    publish_messages(bus, [Outgoing(pipeline.request_topic("interactive"), b"request", key="r1")])
    with bus.join_group("prefill", "p1") as member:
        (delivery,) = take_deliveries(member, 1)
        settler = Settler(Forgetful(member), pipeline)  # type: ignore[arg-type]
        mine = delivery if is_held else replace(delivery, is_held=False)
        jobs = pipeline.job_topic("interactive")
        settler.settle(
            Settlement(mine, [Outgoing(jobs, b"first", key="r1")]),
            again=lambda: Settlement(mine, [Outgoing(jobs, b"second", key="r1")]),
        )
        outcomes: list[bool] = []

        def has_ended() -> bool:
            outcomes.extend(is_settled for _, is_settled in settler.collect())
            return bool(outcomes)

        wait_for(has_ended, "the settlement's end")
        wait_for(lambda: not settler.trouble, "nothing is tried any more, so nothing is wrong")
        assert len(settler) == 0, "nothing is under way"
        settler.close()
        assert list_values(bus.read_all(jobs)) == [b"first", b"second"][: 1 + is_again]
        assert outcomes == [is_again]  # the next holder settles a lost delivery from the record


PROBE = "probe"


def shrink_topic(bus: KafkaBus, topic: str, limit: str) -> None:
    """Lower the brokers' limit of a topic, and wait until they refuse what is larger."""
    set_topic_settings(bus, topic, {"max.message.bytes": limit})

    def is_refused() -> bool:
        try:
            publish_messages(bus, [Outgoing(topic, random.Random(1).randbytes(3000), PROBE)])
        except RequestTooLarge:
            return True
        return False

    wait_for(is_refused, "what is larger is refused")


@pytest.mark.parametrize("stage", ["prefill", "decode"])
def test_what_its_topic_does_not_take_ends_alone_with_an_error(kafka: str, pipeline: Pipeline, stage: Stage) -> None:
    """The brokers' limits are lower than the topics': first a result's or a job's, then its dead letter's too."""
    bus = make_bus("kafka", pipeline, kafka)
    bus.create_topics()
    topic = pipeline.results_topic if stage == "decode" else pipeline.job_topic("interactive")
    assert isinstance(bus, KafkaBus)
    for name, limit in ((topic, "2000"), (pipeline.dead_letter_topic, "1500")):
        shrink_topic(bus, name, limit)
    inputs, names = pipeline.input_topics(stage)["interactive"], ["r0", "r1", "r2"]
    publish_messages(bus, [Outgoing(inputs, random.Random(name).randbytes(3000), name) for name in names])

    def make(request_id: str, name: str = "job") -> list[Outgoing]:
        text = "x" * 3000 * (request_id == "r1")
        made = Result(id=request_id, finish_reason="stop", text=text), Job(id=request_id, job=name, fingerprint=text)
        return [Outgoing(topic, made[stage == "prefill"].encode(), request_id)]

    settled: dict[object, bool] = {}

    def are_settled() -> bool:
        settled.update({one.settlement.delivery.key: is_settled for one, is_settled in settler.collect()})
        return len(settled) == 3

    with bus.join_group(stage, "a") as member:
        taken, settler = take_deliveries(member, 3), Settler(member, pipeline)
        with settler._lock:  # all are there before the first is settled
            for one in taken:
                again = partial(lambda one: Settlement(one, make(one.key or "", "again")), one)
                settler._open[one.address] += 1
                settler._pending.put(Settling(Settlement(one, make(one.key or "")), again=again))
        wait_for(are_settled, "all are settled")
        settler.close()
        assert settled == dict.fromkeys(names, True)
        assert member.count_held() == 0
    found = [json.loads(one.value) for one in bus.read_all(topic) if one.key != PROBE]
    errors = {one["id"]: one["error"]["code"] for one in found if one.get("error")}
    assert errors == {"r1": "internal_error"}
    assert {one["id"] for one in found} == set(names)
    assert stage == "prefill" or len(found) == 3
    (letter,) = [one for one in bus.read_all(pipeline.dead_letter_topic) if one.key != PROBE]
    assert (letter.key, letter.headers[TRUNCATED_HEADER]) == ("r1", "3000")
    assert topic in letter.headers[REASON_HEADER]


def test_a_request_that_its_topic_does_not_take_is_refused_and_not_sent_again(kafka: str, pipeline: Pipeline) -> None:
    bus = KafkaBus(pipeline, kafka, SETTINGS)
    bus.create_topics()
    shrink_topic(bus, pipeline.request_topic("interactive"), "2000")


def test_a_caller_is_told_that_its_topic_does_not_take_a_request(
    kafka: str, redis_url: str, pipeline: Pipeline
) -> None:
    with ScriptedPipeline(redis_url, pipeline, kafka=kafka) as scripted:
        assert isinstance(scripted.bus, KafkaBus)
        shrink_topic(scripted.bus, pipeline.request_topic("interactive"), "2000")
        body = {"model": scripted.model, "prompt": random.Random(1).randbytes(4000).hex(), "max_tokens": 5}
        with scripted.open_gateway() as gateway, gateway.client() as client:
            answer = client.post("/v1/completions", json=body)
            assert (answer.status_code, answer.json()["error"]["code"]) == (413, "request_too_large")
