"""Whatever a topic or a log holds, workers live, and each message is settled once; those around it are answered."""

import json
from collections.abc import Callable
from typing import Any, cast

import pytest
from confluent_kafka import Message

from penstock import names
from penstock.bus.contract import Outgoing
from penstock.bus.kafka.client import parse_delivery
from penstock.config.settings import EndpointSettings
from penstock.endpoint_worker.endpoints import Endpoints, parse_urls
from penstock.endpoint_worker.engine import EndpointEngine
from penstock.endpoint_worker.role import EndpointRole
from penstock.messages import Job, Request, Sampling
from penstock.testing.bus import MemoryBus
from penstock.worker.worker import Worker
from sim.damage import NUM_DAMAGED, Damage
from sim.endpoint import MODEL, CountingEndpoint
from sim.line import InProcessPipeline, run_until_idle

pytestmark = pytest.mark.in_memory

ROUND = 100
SAMPLING = Sampling(max_tokens=2, temperature=0, ignore_eos=True)
HEADERS: dict[str, bytes] = {
    names.VERSION_HEADER: b"1", names.TENANT_HEADER: b"acme", names.CLASS_HEADER: b"interactive",
    names.OPERATION_HEADER: b"chat", names.ORIGIN_HEADER: b"a-topic", names.REASON_HEADER: b"internal_error: x",
    "traceparent": b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", "tracestate": b"a=b,c=d",
    "baggage": b"user=x,is=y",
}  # fmt: skip


def put_message(bus: MemoryBus, topic: str, seed: int, value: dict[str, Any]) -> None:
    """Put a damaged message in a topic, as a worker reads it of Kafka."""
    damage, make = Damage(seed), cast("Any", Message)  # its stubs know no arguments
    is_value = damage.random.random() < 0.7
    raw = damage.encode(value) if is_value else json.dumps(value).encode()
    key, headers = str(value["id"]).encode(), dict[str, bytes | None](HEADERS)
    if not is_value or damage.random.random() < 0.3:
        key = damage.damage_bytes(key)
        for name in damage.random.sample(list(headers), 3):
            headers[name] = None if damage.random.random() < 0.2 else damage.damage_bytes(HEADERS[name])
        headers["\u2028" * damage.random.randrange(3)] = b"\xff" * damage.random.randrange(300)
    written = {"value": raw, "key": damage.random.choice([key, key, key, None]), "headers": list(headers.items())}
    message = make(topic=topic, partition=0, offset=seed, timestamp=(1, 1_700_000_000_000), **written)
    came = parse_delivery(message, "interactive")
    bus.append([Outgoing(topic, came.value, came.key, came.headers)])


def check_round(line: InProcessPipeline, turn: Callable[[], object], make: Callable[[str, int], Request | Job]) -> None:
    """Check that all good requests, which are among damaged messages, are answered, and each has one result at most."""
    bus = line.bus
    assert isinstance(bus, MemoryBus)
    for first in range(0, NUM_DAMAGED, ROUND):
        for seed in range(first, first + ROUND):
            message = make(f"{'bad' if seed % 10 else 'good'}-{seed}", seed)
            if isinstance(message, Request) and not seed % 10:
                line.send_requests(message)
            else:
                topics = line.pipeline.job_topic if isinstance(message, Job) else line.pipeline.request_topic
                put_message(bus, topics("interactive"), seed, json.loads(message.encode()))
        while any(bus.count_unsettled().values()):
            turn()
    results = line.read_results()
    by_id = {result.id: result for result in results}
    assert len(by_id) == len(results)
    for seed in range(0, NUM_DAMAGED, 10):
        assert by_id[f"good-{seed}"].error is None


def test_no_message_ends_a_prefill_or_a_decode_worker(line: InProcessPipeline) -> None:
    def make(name: str, seed: int) -> Request | Job:
        if seed % 2 or not seed % 10:
            deadline = 2e9 if seed % 2 else None
            return Request(id=name, prompt="In the beginning", sampling=SAMPLING, deadline=deadline)
        return Job(id=name, job=f"job-{seed}", token_ids=[1, 2, 3], sampling=SAMPLING, last_block="ab")

    def turn() -> None:
        run_until_idle(line.prefill)
        run_until_idle(line.decode)

    check_round(line, turn, make)


def test_no_message_ends_an_endpoint_worker(line: InProcessPipeline) -> None:
    with CountingEndpoint() as endpoint:
        settings = EndpointSettings(model=MODEL, urls=endpoint.url)
        pool = Endpoints(parse_urls(settings.urls, settings.max_requests))
        member = line.bus.join_group("endpoint", "endpoint-0")
        role = EndpointRole(line.pipeline, MODEL, EndpointEngine(pool, settings, line.record_settings))
        worker = Worker(role, line.pipeline, "endpoint-0", line.make_record(), member)
        check_round(
            line, worker.run_once, lambda name, _: Request(id=name, prompt="a|", sampling=Sampling(max_tokens=2))
        )
        worker.close()
