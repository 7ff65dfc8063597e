"""Faults that the model found: a job published twice under one name, and a delivery that was never settled."""

from collections.abc import Callable
from typing import Any

from penstock.config.settings import RecordSettings
from penstock.messages import Job, Request, Sampling, TokenEvent, decode_message
from penstock.names import Pipeline
from sim.line import InProcessPipeline, run_until_idle, run_until_running
from sim.waiting import wait_for
from tests.bus.buses import take_deliveries


def test_an_answer_of_one_token_is_given_though_redis_loses_it_all(line: InProcessPipeline, pipeline: Pipeline) -> None:
    """It ended in prefill, and only its job is left, so it is computed again."""
    line.send_requests(Request(id="r1", prompt="In the beginning", sampling=Sampling(max_tokens=1, temperature=0)))
    line.run_prefill(1)
    (job,) = line.bus.read_all(pipeline.job_topic("interactive"))
    (token, _) = line.prefill.record.read_log("r1")
    line.client.delete(pipeline.record_key("r1"), pipeline.log_key("r1"))
    (result,) = line.run_until_results(1)
    assert result.error is None
    assert isinstance(token, TokenEvent)
    assert result.token_ids == [token.token]
    assert decode_message(Job, job.value).token_ids


def test_a_delivery_that_is_being_settled_is_not_claimed_again(make_line: Callable[..., InProcessPipeline]) -> None:
    """It came a second time, and Redis lost the record: the result of another claim would have no delivery."""
    line = make_line(record=RecordSettings(lease_s=30))
    line.send_requests(Request(id="r1", prompt="In the beginning", sampling=Sampling(max_tokens=1)))
    (delivery,) = take_deliveries(line.prefill.member, 1)
    line.prefill.settler._open[delivery.topic, delivery.position] += 1
    assert not list(line.prefill.intake.claim_messages(line.prefill.intake.identify_messages([delivery])))
    assert line.prefill.record.read_status("r1") is None
    assert len(line.prefill.intake.queue) == 1
    line.prefill.settler._open.clear()
    assert len(line.run_until_results(1)) == 1
    assert not line.prefill.member.is_holding(delivery)


def test_a_delivery_is_not_forgotten_when_redis_lost_the_binding(
    make_line: Callable[..., InProcessPipeline], pipeline: Pipeline
) -> None:
    """One job is decoded; then the record is gone, and another job of the request comes to the same worker."""
    line = make_line(record=RecordSettings(lease_s=30))
    request = Request(id="r1", prompt="In the beginning", sampling=Sampling(max_tokens=40, ignore_eos=True))
    line.send_requests(request)
    line.run_prefill(1)
    (first,) = line.bus.read_all(pipeline.job_topic("interactive"))
    run_until_running(line.decode)
    line.client.delete(pipeline.record_key("r1"), pipeline.log_key("r1"))
    second = decode_message(Job, first.value).model_copy(update={"job": "another"})
    line.publish_bytes(second.encode(), "r1", pipeline.job_topic("interactive"))
    while "another" not in [running.name for running in line.decode.running.values()]:
        line.decode.run_once()
    (result,) = line.run_until_results(1)
    run_until_idle(line.decode)
    assert len(result.token_ids) == 40
    assert line.decode.member.count_held() == 0
    assert len(line.read_results()) == 1


def test_what_is_read_after_its_record_has_expired_is_not_answered_again(
    line: InProcessPipeline, pipeline: Pipeline
) -> None:
    """A request that was sent again before its result and after it, and a second job. Later the id is a new request."""
    request = Request(id="r1", prompt="In the beginning", sampling=Sampling(max_tokens=2, temperature=0))
    line.send_requests(request)
    line.run_prefill(1)
    (job,) = line.bus.read_all(pipeline.job_topic("interactive"))
    run_until_running(line.decode)
    line.send_requests(request)
    line.publish_bytes(decode_message(Job, job.value).model_copy(update={"job": "another"}).encode(), "r1", job.topic)
    while not line.read_results():
        line.decode.run_once(accept=False)
    line.send_requests(request)
    line.client.delete(pipeline.record_key("r1"), pipeline.log_key("r1"))
    line.add_prefill("prefill-1")
    line.add_decode("decode-1")
    while any(line.bus.count_unsettled().values()):
        run_until_idle(line.prefill)
        run_until_idle(line.decode)
    assert len(line.read_results()) == 1
    line.record_settings = RecordSettings(keep_s=1)
    line.add_prefill("prefill-2")
    line.add_decode("decode-2")
    results: Any = line.client.xrange(pipeline.stream_key(pipeline.results_topic))
    forgotten_s = int(results[0][0].partition(b"-")[0]) / 1000 + 1
    wait_for(lambda: line.client.time()[0] > forgotten_s, "the id is forgotten")
    line.send_requests(request)
    assert len(line.run_until_results(2)) == 2
