"""Redis or Kafka away for longer than every timeout, while real worker processes answer.

Nothing is lost, no token is seen twice, the streams go on afterwards, and no worker process ends: no model is loaded
anew.
"""

import asyncio
import itertools
import os
import random
import shutil
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import NoReturn

import pytest
import redis

from engine.engine import Engine
from engine.sequence import Sequence
from engine.text import OutputState
from penstock.aio import AsyncClient
from penstock.bus.contract import Delivery, Outgoing, Settlement
from penstock.bus.kafka import KafkaBus
from penstock.client import Answer as WholeAnswer
from penstock.client import Client
from penstock.errors import BusUnavailable, DeliveryLost, MemberFenced
from penstock.local.kafka import KafkaServer
from penstock.local.processes import wait_until
from penstock.local.stack import Stack
from penstock.local.valkey import ValkeyServer
from penstock.messages import Request, Result
from penstock.names import Pipeline
from penstock.reach import ANSWER_S
from penstock.settings import Addresses, BusSettings
from penstock.status import health, worker_status
from penstock.worker.loop import Loop
from prefill_worker.intake import seed_of
from tests.pipeline.checks import Streams, check_results, check_streams, results_of
from tests.pipeline.line import Line
from tests.pipeline.workload import SETTINGS, Answer, demo_model, requests
from tests.servers import started

pytestmark = pytest.mark.timeout(180)
NUM_REQUESTS = 8
MAX_TOKENS = 160
LONG_S = ANSWER_S + 2.0
"""Longer than anybody waits for Redis, than leases last, and than groups keep a silent member."""
LEAVE_WITHIN_S = 20.0
_tags = itertools.count()


class Site:
    """Servers that can be stopped, and one worker of each stage on them."""

    def __init__(self, directory: Path, bus: str) -> None:
        self.redis = ValkeyServer(directory / "redis")
        self.kafka = KafkaServer(directory / "kafka") if bus == "kafka" else None
        self._directory = directory
        self._servers = [server for server in (self.redis, self.kafka) if server is not None]
        self.stack: Stack

    def start(self) -> None:
        for server in self._servers:
            server.start()
        environment = {
            "PENSTOCK_ENGINE_DTYPE": "float32",
            "PENSTOCK_ENGINE_MAX_STEP_TOKENS": str(SETTINGS.max_step_tokens),
            "PENSTOCK_ENGINE_POOL_MB": "64",
            "PENSTOCK_WORKER_HEARTBEAT_S": "0.3",
            "PENSTOCK_KV_STORE_REDIS_MB": "0",
        }
        kafka = self.kafka.bootstrap if self.kafka is not None else ""
        name = f"outages-{random.getrandbits(32):08x}"
        self.stack = Stack(self._directory, pipeline=name, kafka=kafka, redis=self.redis.url, environment=environment)
        self.stack.start()

    def stop(self) -> None:
        if hasattr(self, "stack"):
            self.stack.stop()
        for server in self._servers:
            server.stop()

    def pids(self) -> list[int]:
        """Of the worker processes that run."""
        return [worker.child.pid for worker in self.stack.workers if worker.child and worker.child.alive()]

    def states(self) -> list[str]:
        return [status["state"] for status in worker_status(self.stack.addresses)]

    def wait_ready(self) -> None:
        try:
            wait_until(lambda: self.states() == ["ready", "ready"], 60, "both workers are ready", every_s=0.05)
        except TimeoutError as error:
            raise TimeoutError(f"{error}: {self.pids()}, {worker_status(self.stack.addresses)}") from None


def site_on(bus: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    made = Site(tmp_path_factory.mktemp(bus), bus)
    try:
        started(made.start)
        yield made
    finally:
        made.stop()


@pytest.fixture(scope="module")
def embedded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    yield from site_on("embedded", tmp_path_factory)


@pytest.fixture(scope="module")
def on_kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    yield from site_on("kafka", tmp_path_factory)


def work() -> list[Request]:
    """The same requests as ever, under new ids."""
    longer = {"max_tokens": MAX_TOKENS, "ignore_eos": True}
    return [
        request.model_copy(update={"sampling": request.sampling.model_copy(update=longer)})
        for request in requests(NUM_REQUESTS, f"w{next(_tags)}")
    ]


@cache
def answers() -> list[Answer]:
    """What the undivided engine says to them, all in one batch."""
    model, engine, asked = demo_model(), Engine(demo_model(), SETTINGS), work()
    seqs = [
        Sequence(
            request.id,
            list(request.token_ids or ()),
            sampling=request.sampling,
            seed=seed_of(request),
            max_new=MAX_TOKENS,
        )
        for request in asked
    ]
    for seq in seqs:
        engine.add(seq)
    while any(seq.num_output < MAX_TOKENS for seq in seqs):
        for item in engine.step():
            if item.seq.num_output == MAX_TOKENS:
                engine.remove(item.seq)
    states = [OutputState(model.tokenizer, request.sampling, model.eos_token_ids, MAX_TOKENS) for request in asked]
    texts = ["".join(state.push(token)[0] for token in seq.output) for state, seq in zip(states, seqs, strict=True)]
    return [Answer(seq.output, text, "length") for seq, text in zip(seqs, texts, strict=True)]


def submit(client: Client, request: Request) -> None:
    client.submit(
        token_ids=request.token_ids or [], id=request.id, tenant=request.tenant, **request.sampling.model_dump()
    )


@contextmanager
def streaming(site: Site) -> Iterator[Streams]:
    """Some tokens of each answer were seen; at the end all are whole, with one result each, by the same processes."""
    asked = work()
    expected = dict(zip([request.id for request in asked], answers(), strict=True))
    site.wait_ready()
    before = site.pids()
    with Client(site.stack.addresses) as client:
        streams = Streams(client, asked)
        for request in asked:
            submit(client, request)
        wait_until(lambda: all(len(seen) > 3 for seen in streams.events.values()), 30, "the first tokens")
        yield streams
        streams.finish()
    check_streams(streams, expected)
    check_results(results_when_all_there(site, expected), expected)
    assert site.pids() == before


def results_when_all_there(site: Site, expected: dict[str, Answer]) -> list[Result]:
    """Once each id has one."""

    def all_there() -> bool:
        return expected.keys() <= {result.id for result in results_of(site.stack.addresses)}

    wait_until(all_there, 30, "a result for each", every_s=0.2)
    return results_of(site.stack.addresses)


@contextmanager
def hanging(pid: int | None) -> Iterator[None]:
    """A process does nothing meanwhile, and its connections stay open."""
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def leave(site: Site) -> None:
    """Both workers end in order, and soon."""
    children = [worker.child for worker in site.stack.workers if worker.child is not None]
    begun_s = time.monotonic()
    for child in children:
        child.send(signal.SIGTERM)
    assert [child.wait(30.0) for child in children] == [0, 0]
    assert time.monotonic() - begun_s < LEAVE_WITHIN_S


def test_a_worker_that_is_let_go_of_leaves_the_engine_empty(tmp_path: Path, pipeline: Pipeline) -> None:
    """Also of what is on its way to or from the store; and another goes on with what it had."""
    with ValkeyServer(tmp_path) as server, Line(Addresses(pipeline=pipeline.name, stream_url=server.url)) as line:
        line.send(*work())
        line.run_prefill(1)
        line.send(*work())
        workers = (line.prefill, line.decode)
        for worker in workers:
            while not worker.running:
                worker.turn()
        server.kill()
        for worker in workers:
            with pytest.raises((redis.ConnectionError, BusUnavailable)):
                turn_for_ever(worker)
            worker.abandon()
            assert worker.engine.num_free_blocks == worker.engine.pool.num_blocks
            assert not worker.engine.quay.held()
            assert not worker.engine.has_work()
        server.start()
        line.add_prefill("prefill-0")
        line.add_decode("decode-0")
        assert {result.error for result in line.run_until(2 * NUM_REQUESTS)} == {None}


def turn_for_ever(worker: Loop) -> NoReturn:
    while True:
        worker.turn()


def test_redis_hangs(embedded: Site) -> None:
    with streaming(embedded), hanging(embedded.redis.pid):
        assert health(embedded.stack.addresses).state == "down"
        time.sleep(LONG_S)


def test_redis_is_killed_and_comes_back_with_what_it_had(embedded: Site) -> None:
    """What is asked of it meanwhile fails with a typed error; readers wait, those of `AsyncClient` too."""
    addresses = embedded.stack.addresses

    async def read(request_id: str) -> WholeAnswer:
        async with AsyncClient(addresses) as client:
            return await client.result(request_id)

    with Client(addresses) as client, ThreadPoolExecutor(1) as pool, streaming(embedded) as streams:
        last = list(streams.events)[-1]
        reading = pool.submit(asyncio.run, read(last))
        embedded.redis.kill()
        for call in (lambda: client.cancel("any"), lambda: client.submit("any", id="any")):
            with pytest.raises(BusUnavailable):
                call()
        time.sleep(1.0)
        embedded.redis.start()
    assert reading.result(30.0).token_ids == answers()[-1].token_ids


def test_workers_leave_soon_while_redis_hangs(embedded: Site) -> None:
    """The last of its stack."""
    embedded.wait_ready()
    with hanging(embedded.redis.pid):
        leave(embedded)


def test_kafka_is_killed_and_comes_back(on_kafka: Site) -> None:
    """What runs is answered meanwhile; its results are settled afterwards."""
    assert on_kafka.kafka is not None
    with streaming(on_kafka) as streams:
        on_kafka.kafka.kill()
        wait_until(lambda: on_kafka.states() == ["degraded", "degraded"], 30, "both workers say so", every_s=0.1)
        assert "Kafka" in worker_status(on_kafka.stack.addresses)[0]["reason"]
        streams.wait_for(NUM_REQUESTS)
        on_kafka.kafka.start()
    on_kafka.wait_ready()
    assert health(on_kafka.stack.addresses).state == "ok"


def test_kafka_hangs(on_kafka: Site) -> None:
    assert on_kafka.kafka is not None
    with streaming(on_kafka), hanging(on_kafka.kafka.pid):
        time.sleep(LONG_S)


def test_a_member_that_was_cut_off_while_it_settled_is_not_stuck(on_kafka: Site, pipeline: Pipeline) -> None:
    """The broker ends the open transaction of who is silent: settling goes on, or the member is done with."""
    assert on_kafka.kafka is not None
    bus = KafkaBus(pipeline, on_kafka.kafka.bootstrap, BusSettings(transaction_timeout_s=1.0))
    bus.create_topics()
    publisher = bus.publisher()
    publisher.publish([Outgoing(pipeline.requests("interactive"), b"x", str(n)) for n in range(2)])
    publisher.close()
    with bus.member("prefill", "a") as member:
        found: list[Delivery] = []
        while len(found) < 2:
            found += member.poll(1.0, {"interactive": 2})
        done, settlement = [Settlement(one, [Outgoing(pipeline.jobs("interactive"), b"job")]) for one in found]
        member.settle([done])
        with hanging(on_kafka.kafka.pid):
            for _ in range(2):
                with pytest.raises(BusUnavailable):
                    member.settle([settlement])

        def is_decided() -> bool:
            try:
                member.settle([settlement])
            except BusUnavailable:
                return False
            except (DeliveryLost, MemberFenced):
                pass
            return True

        wait_until(is_decided, 30, "it is settled or refused", every_s=0.1)


def test_redis_comes_back_empty(on_kafka: Site) -> None:
    """Requests are generated again from the topics: readers go on where the new tokens are those they had."""
    with streaming(on_kafka):
        on_kafka.redis.kill()
        shutil.rmtree(on_kafka.redis.directory)
        on_kafka.redis.start()


def test_one_worker_after_the_other_is_restarted_under_load(on_kafka: Site) -> None:
    """Requests keep coming; none of them sees an error, and each has one answer, the same as the others."""
    on_kafka.wait_ready()
    over = threading.Event()
    asked: list[Future[WholeAnswer]] = []
    with Client(on_kafka.stack.addresses) as client, ThreadPoolExecutor(100) as pool:

        def ask() -> WholeAnswer:
            request_id = client.submit("In the beginning", max_tokens=20, temperature=0.0, ignore_eos=True)
            return client.result(request_id, timeout_s=60.0)

        def keep_asking() -> None:
            while not over.wait(0.2):
                asked.append(pool.submit(ask))

        asking = threading.Thread(target=keep_asking)
        asking.start()
        try:
            for worker in on_kafka.stack.workers:
                assert worker.child is not None
                assert worker.child.stop(timeout_s=60.0) == 0
                on_kafka.stack.tend()
                on_kafka.wait_ready()
        finally:
            over.set()
            asking.join()
        answers = [future.result() for future in asked]
    assert len(answers) > 20
    assert len({tuple(answer.token_ids) for answer in answers}) == 1
    ids = {answer.id for answer in answers}
    settled = Counter(result.id for result in results_of(on_kafka.stack.addresses) if result.id in ids)
    assert settled == Counter(ids)


def test_workers_leave_soon_while_kafka_hangs(on_kafka: Site) -> None:
    """With work that they cannot settle. The last of its stack."""
    assert on_kafka.kafka is not None
    asked = work()
    on_kafka.wait_ready()
    with Client(on_kafka.stack.addresses) as client:
        for request in asked:
            submit(client, request)
        first = next(client.stream(asked[-1].id))
        assert first.text
        with hanging(on_kafka.kafka.pid):
            leave(on_kafka)
