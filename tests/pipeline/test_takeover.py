"""A worker falls silent: another one continues without a delivery, and the first one does no harm when it wakes up."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from confluent_kafka.admin import AdminClient

from penstock.config.addresses import Addresses
from penstock.config.settings import BusSettings, RecordSettings
from penstock.messages import Request, Sampling
from penstock.names import Pipeline, Stage, add_tenant
from penstock.prefill_worker.role import MAX_WAITING_STEPS
from sim.kafka_server import KafkaServer
from sim.line import InProcessPipeline, run_until_running
from sim.servers import start_or_skip
from sim.waiting import wait_for
from sim.workload import ENGINE_SETTINGS, compute_answers, make_requests
from tests.pipeline.site import worker_process
from tests.record.play import tokens_of

LEASE_S = 0.4
RECORD = RecordSettings(lease_s=LEASE_S)
NUM_PARTITIONS = BusSettings().partitions


def long(max_tokens: int) -> Request:
    sampling = Sampling(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    return make_requests(4, "any")[-1].model_copy(update={"id": "long", "sampling": sampling})


@pytest.mark.in_memory
def test_a_prompt_longer_than_a_worker_takes_ahead_is_taken_over_alone(
    make_line: Callable[..., InProcessPipeline],
) -> None:
    line = make_line(record=RECORD, engine=ENGINE_SETTINGS.model_copy(update={"max_step_tokens": 8}))
    first = long(4)
    assert len(first.token_ids or ()) > MAX_WAITING_STEPS * 8
    line.send_requests(first)
    silent = line.silence_worker("prefill")
    line.send_requests(first.model_copy(update={"id": "another"}))
    line.run_prefill(2)
    silent.close()


@pytest.mark.in_memory
def test_a_worker_whose_deliveries_all_run_elsewhere_begins_new_requests(
    make_line: Callable[..., InProcessPipeline],
) -> None:
    """A worker left, a second one runs its long answers, and the deliveries came to a third."""
    line = make_line(record=RECORD, engine=ENGINE_SETTINGS.model_copy(update={"max_batch": 2}))
    line.send_requests(*[long(300).model_copy(update={"id": f"long-{n}"}) for n in range(2)])
    line.run_prefill(2)
    run_until_running(line.decode, 2)
    first = line.silence_worker("decode")
    heir = line.decode
    run_until_running(heir, 2)
    first.member.close()
    line.add_decode("decode-2")
    while len(line.decode.intake.queue) < 2:
        line.decode.run_once()
    line.send_requests(long(4).model_copy(update={"id": "new"}))
    line.run_prefill(3)

    def has_answered() -> bool:
        line.decode.run_once()
        return [result.id for result in line.read_results()] == ["new"]

    wait_for(has_answered, "the new request's result", 0)
    assert len(heir.running) == len(line.decode.intake.queue) == 2
    heir.close()


@pytest.fixture(scope="module")
def patient_kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A Kafka that believes in a dead member for ten minutes in place of 45 s, so longer than a slow machine needs."""
    timeouts = {f"group.consumer.{name}session.timeout.ms": "600000" for name in ("", "max.")}
    with start_or_skip(KafkaServer(tmp_path_factory.mktemp("patient"), timeouts=timeouts).start) as server:
        yield server.bootstrap


@pytest.mark.parametrize(("stage", "tenant"), [("prefill", ""), ("decode", ""), ("prefill", "acme")])
def test_what_arrives_for_a_killed_worker_goes_on(
    stage: Stage, tenant: str, patient_kafka: str, redis_url: str, pipeline: Pipeline, tmp_path: Path
) -> None:
    """All partitions, a tenant's own ones too, are still a dead member's: another worker answers what is put there."""
    work = [
        one.model_copy(update={"tenant": tenant or one.tenant}) for one in make_requests(6, pipeline.name, max_tokens=8)
    ]
    addresses = Addresses(pipeline=pipeline.name, stream_url=redis_url, kafka=patient_kafka)
    settings = {"KAFKA": patient_kafka, "WORKER_NAME": "victim", "RECORD_LEASE_S": str(LEASE_S)}
    with InProcessPipeline(addresses, RECORD) as line:
        (line.decode if stage == "decode" else line.prefill).close()
        topic, group = pipeline.input_topics(stage)["interactive"], pipeline.consumer_group(stage)
        if tenant:
            line.bus.create_topics(tenant)
            topic = add_tenant(topic, tenant)

        def is_all_read() -> bool:
            named = [str(part, "utf-8") for part in line.client.hkeys(pipeline.readers_key)]  # type: ignore[arg-type]
            return sum(part.startswith(f"{topic}:") for part in named) == NUM_PARTITIONS

        with worker_process(stage, addresses, tmp_path, settings=settings):
            wait_for(is_all_read, "it reads them all")
        (line.add_decode if stage == "decode" else line.add_prefill)("another")
        for request in work:
            line.publish_bytes(request.encode(), request.id, topic if tenant else None)
        record = line.prefill.record

        def are_answered() -> bool:
            line.prefill.run_once()
            line.decode.run_once()
            found = [record.read_status(request.id) for request in work]
            return all(status is not None and status.stage == "end" for status in found)

        wait_for(are_answered, "all have their answers", 0)
        for name, answer in compute_answers(work).items():
            assert tokens_of(record.read_log(name)) == answer.token_ids
        admin = AdminClient({"bootstrap.servers": patient_kafka})
        members = admin.describe_consumer_groups([group])[group].result().members
        assert "victim" in [member.client_id for member in members]  # as the brokers still believe
