"""What the model found in the workers: a job that went out twice under one name, and a delivery that was forgotten."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from penstock.bus.contract import Bus, Member, Outgoing, Settlement
from penstock.config.addresses import Addresses
from penstock.config.settings import RecordSettings
from penstock.errors import BusUnavailable
from penstock.messages import Job, Request, Sampling, TokenEvent, decode_message
from penstock.names import Pipeline
from penstock.waiting import wait_until
from penstock.worker.loop import run_until_idle
from penstock.worker.settler import Settler
from sim.line import InProcessPipeline
from tests.bus.buses import make_bus, publish, take, values


class Forgetful:
    """A member whose first settlement is done, and its reply lost."""

    current_problem = ""

    def __init__(self, member: Member) -> None:
        self._member, self._has_forgotten = member, False

    def settle(self, settlements: Sequence[Settlement]) -> None:
        self._member.settle(settlements)
        if not self._has_forgotten:
            self._has_forgotten = True
            raise BusUnavailable("the reply is lost")


@pytest.fixture
def bus(redis_url: str, pipeline: Pipeline) -> Bus:
    made = make_bus("streams", pipeline, redis_url)
    made.create_topics()
    return made


@pytest.fixture
def on_kafka(kafka: str, pipeline: Pipeline) -> Bus:
    made = make_bus("kafka", pipeline, kafka)
    made.create_topics()
    return made


@pytest.mark.parametrize(
    ("kind", "is_held", "is_again"),
    [("bus", True, False), ("bus", False, True), ("on_kafka", True, False), ("on_kafka", False, True)],
)
def test_no_job_goes_out_twice_under_one_name_though_the_reply_is_lost(
    kind: str, is_held: bool, is_again: bool, pipeline: Pipeline, request: pytest.FixtureRequest
) -> None:
    """Where its delivery says that it is out, it does not go out again; else under another name."""
    bus: Bus = request.getfixturevalue(kind)
    publish(bus, [Outgoing(pipeline.request_topic("interactive"), b"request", key="r1")])
    with bus.join_group("prefill", "p1") as member:
        (delivery,) = take(member, 1)
        settler = Settler(Forgetful(member), pipeline)  # type: ignore[arg-type]
        mine, jobs = replace(delivery, is_held=is_held), pipeline.job_topic("interactive")
        settler.settle(
            Settlement(mine, [Outgoing(jobs, b"first", key="r1")]),
            again=lambda: Settlement(mine, [Outgoing(jobs, b"second", key="r1")]),
        )
        told: list[tuple[None, bool]] = []

        def is_told() -> bool:
            told.extend(settler.collect())
            return bool(told)

        wait_until(is_told, 10, "the settlement's end")
        wait_until(lambda: not settler.trouble, 10, "nothing is tried any more, so nothing is wrong")
        settler.close()
        assert values(bus.read_all(jobs)) == [b"first", b"second"][: 1 + is_again]
        assert told == [(None, is_again)]  # what was lost is settled by who gets it, from the record


def test_an_answer_of_one_token_is_given_though_redis_loses_it_all(redis_url: str, pipeline: Pipeline) -> None:
    """It had ended in prefill, and only its job is left: it is computed again."""
    with InProcessPipeline(Addresses(pipeline=pipeline.name, stream_url=redis_url)) as line:
        line.send_requests(Request(id="r1", prompt="In the beginning", sampling=Sampling(max_tokens=1, temperature=0)))
        line.run_prefill(1)
        (job,) = line.bus.read_all(pipeline.job_topic("interactive"))
        (said, _) = line.prefill.record.read_log("r1")
        line.client.delete(pipeline.record_key("r1"), pipeline.log_key("r1"))
        (result,) = line.run_until_results(1)
        assert result.error is None
        assert isinstance(said, TokenEvent)
        assert result.token_ids == [said.token]
        assert decode_message(Job, job.value).token_ids


def test_a_delivery_that_is_being_settled_is_not_claimed_again(redis_url: str, pipeline: Pipeline) -> None:
    """It came a second time, and Redis forgot what it was settled for: its result would have no delivery."""
    with InProcessPipeline(Addresses(pipeline=pipeline.name, stream_url=redis_url), RecordSettings(lease_s=30)) as line:
        line.send_requests(Request(id="r1", prompt="In the beginning", sampling=Sampling(max_tokens=1)))
        (delivery,) = take(line.prefill.member, 1)
        line.prefill.settler._open[delivery.topic, delivery.position] += 1
        line.prefill._claim_messages(line.prefill._read_messages([delivery]))
        assert line.prefill.record.read_status("r1") is None
        assert len(line.prefill.queue) == 1
        line.prefill.settler._open.clear()
        assert len(line.run_until_results(1)) == 1
        assert not line.prefill.member.is_holding(delivery)


def test_a_delivery_is_not_forgotten_when_redis_lost_the_binding(redis_url: str, pipeline: Pipeline) -> None:
    """One job is decoded; then the record is gone, and another job of the request comes to the same worker."""
    with InProcessPipeline(Addresses(pipeline=pipeline.name, stream_url=redis_url), RecordSettings(lease_s=30)) as line:
        request = Request(id="r1", prompt="In the beginning", sampling=Sampling(max_tokens=40, ignore_eos=True))
        line.send_requests(request)
        line.run_prefill(1)
        (first,) = line.bus.read_all(pipeline.job_topic("interactive"))
        while not line.decode.running:
            line.decode.run_once()
        line.client.delete(pipeline.record_key("r1"), pipeline.log_key("r1"))
        second = decode_message(Job, first.value).model_copy(update={"job": "another"})
        line.publish_bytes(second.encode(), "r1", pipeline.job_topic("interactive"))
        while "another" not in [running.job_name for running in line.decode.running.values()]:
            line.decode.run_once()
        (result,) = line.run_until_results(1)
        run_until_idle(line.decode)
        assert len(result.token_ids) == 40
        assert line.decode.member.count_held() == 0
        assert len(line.read_results()) == 1
