"""A worker falls silent: another one continues without a delivery, and the first one does no harm when it wakes up."""

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from confluent_kafka.admin import AdminClient

from penstock.client.sync import Client
from penstock.config.addresses import Addresses
from penstock.config.settings import BusSettings, RecordSettings
from penstock.local.kafka import KafkaServer
from penstock.messages import Request, Sampling, TokenEvent
from penstock.names import Pipeline, Stage
from penstock.prefill_worker.role import MAX_WAITING_STEPS
from penstock.worker.worker import Worker
from sim.forked import fork_process, run_penstock
from sim.line import InProcessPipeline, run_until_running
from sim.servers import start_or_skip
from sim.waiting import PATIENCE_S, wait_for
from sim.workload import ENGINE_SETTINGS, compute_answers, make_requests

LEASE_S = 0.4
RECORD = RecordSettings(lease_s=LEASE_S)
NUM_PARTITIONS = BusSettings().partitions


def long(max_tokens: int) -> Request:
    sampling = Sampling(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    return make_requests(4, "any")[-1].model_copy(update={"id": "long", "sampling": sampling})


def read_tokens(line: InProcessPipeline, request_id: str, *workers: Worker) -> list[int]:
    """Turn workers until a client has read the stream of a request to its end; return its tokens."""
    tokens: list[int] = []

    def read() -> None:
        with Client(line.addresses) as client:
            events = client.stream(request_id, timeout_s=PATIENCE_S)
            tokens.extend(event.token for event in events if isinstance(event, TokenEvent))

    reader = threading.Thread(target=read)
    reader.start()

    def has_ended() -> bool:
        for worker in workers:
            worker.run_once()
        return not reader.is_alive()

    wait_for(has_ended, "the stream's end", 0)
    return tokens


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
    while len(line.decode.queue) < 2:
        line.decode.run_once()
    line.send_requests(long(4).model_copy(update={"id": "new"}))
    line.run_prefill(3)

    def has_answered() -> bool:
        line.decode.run_once()
        return [result.id for result in line.read_results()] == ["new"]

    wait_for(has_answered, "the new request's result", 0)
    assert len(heir.running) == len(line.decode.queue) == 2
    heir.close()


@pytest.fixture(scope="module")
def patient_kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A Kafka with its timeouts at their defaults: it notices a dead member after 45 s."""
    with start_or_skip(KafkaServer(tmp_path_factory.mktemp("patient"), timeouts={}).start) as server:
        yield server.bootstrap


def test_what_waited_in_a_killed_worker_goes_on(
    patient_kafka: str, redis_url: str, pipeline: Pipeline, tmp_path: Path
) -> None:
    """It had fetched more than it had room for. The group thinks that it lives, and keeps its partitions for it."""
    # On a fast machine too, the victim has work for several times the two leases after which a message is parked.
    work = make_requests(48, pipeline.name, max_tokens=8)
    addresses = Addresses(pipeline=pipeline.name, stream_url=redis_url, kafka=patient_kafka)
    # A shorter lease runs out on a busy machine while the request is computed, again and again.
    with InProcessPipeline(addresses, RecordSettings(lease_s=2.0)) as line:
        line.prefill.close()
        line.send_requests(*work)
        log, environment = tmp_path / "victim.log", make_environment(addresses)
        victim = fork_process("victim", log, run_penstock, "worker", "prefill", environment=environment)

        def waiting() -> list[str]:
            found = {request.id: line.prefill.record.read_status(request.id) for request in work}
            return [
                name
                for name, status in found.items()
                if status and status.stage == "prefill" and not status.worker_name
            ]

        wait_for(lambda: len(waiting()) > 2, "some are parked")
        victim.kill()
        left = waiting()
        line.add_prefill("another")

        def have_ended() -> bool:
            both = line.prefill, line.decode
            for worker in [one for one in both if one.running] or both:  # who has nothing to do waits for messages
                worker.run_once()
            found = [line.prefill.record.read_status(name) for name in left]
            return all(status is not None and status.stage == "end" for status in found)

        wait_for(have_ended, "all have their answers", 0)
        expected = compute_answers([request for request in work if request.id in left[:4]])
        for name in expected:
            events = line.prefill.record.read_log(name)
            assert [event.token for event in events if isinstance(event, TokenEvent)] == expected[name].token_ids


@pytest.mark.parametrize("stage", ["prefill", "decode"])
def test_what_arrives_for_a_killed_worker_goes_on(
    stage: Stage, patient_kafka: str, redis_url: str, pipeline: Pipeline, tmp_path: Path
) -> None:
    """All partitions are a dead member's for 45 s, and another worker answers what is put there now."""
    work = make_requests(6, pipeline.name, max_tokens=8)
    addresses = Addresses(pipeline=pipeline.name, stream_url=redis_url, kafka=patient_kafka)
    with InProcessPipeline(addresses, RECORD) as line:
        (line.decode if stage == "decode" else line.prefill).close()
        victim = fork_process(
            "victim", tmp_path / "victim.log", run_penstock, "worker", stage, environment=make_environment(addresses)
        )
        topic = pipeline.input_topics(stage)["interactive"]

        def is_all_read() -> bool:
            named = [str(part, "utf-8") for part in line.client.hkeys(pipeline.readers_key)]  # type: ignore[arg-type]
            return sum(part.startswith(topic) for part in named) == NUM_PARTITIONS

        wait_for(is_all_read, "it reads them all")
        victim.kill()
        (line.add_decode if stage == "decode" else line.add_prefill)("another")
        line.send_requests(*work)
        expected = compute_answers(work)
        for request in work:
            assert read_tokens(line, request.id, line.prefill, line.decode) == expected[request.id].token_ids
        assert "victim" in list_members(patient_kafka, pipeline.consumer_group(stage))  # as the brokers still believe


def list_members(kafka: str, group: str) -> list[str]:
    """Return the client ids of a group's members, as the brokers know them."""
    admin = AdminClient({"bootstrap.servers": kafka})
    described = admin.describe_consumer_groups([group])[group].result()
    return [member.client_id for member in described.members]


def make_environment(addresses: Addresses) -> dict[str, str]:
    """Return the environment of a worker process that runs one request at a time, slowly."""
    return {
        **os.environ,
        "PENSTOCK_PIPELINE": addresses.pipeline,
        "PENSTOCK_STREAM_URL": addresses.stream_url,
        "PENSTOCK_KAFKA": addresses.kafka,
        "PENSTOCK_WORKER_NAME": "victim",
        "PENSTOCK_RECORD_LEASE_S": str(LEASE_S),
        "PENSTOCK_ENGINE_DTYPE": "float32",
        "PENSTOCK_ENGINE_MAX_BATCH": "1",
        "PENSTOCK_ENGINE_MAX_STEP_TOKENS": "4",
        "PENSTOCK_KV_STORE_SHARED_MB": "0",
    }
