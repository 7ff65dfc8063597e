"""Redis away for longer than every timeout, while real worker processes answer.

Nothing is lost, no token is seen twice, the streams go on afterwards, and no worker process ends: no model is loaded
anew.
"""

import asyncio
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NoReturn

import pytest
import redis

from penstock.client.aio import AsyncClient
from penstock.client.core import Answer as WholeAnswer
from penstock.client.sync import Client
from penstock.config.addresses import Addresses
from penstock.errors import BusUnavailable
from penstock.local.valkey import ValkeyServer
from penstock.names import Pipeline
from penstock.worker.loop import WorkerLoop
from sim.line import InProcessPipeline, core_of, run_until_running, serving_engine
from tests.pipeline.site import NUM_REQUESTS, Site, answers, hanging, leave, site_on, streaming, work


@pytest.fixture(scope="module")
def embedded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    yield from site_on("embedded", tmp_path_factory, Site)


def test_a_worker_that_is_let_go_of_leaves_the_engine_empty(tmp_path: Path, pipeline: Pipeline) -> None:
    """Also of what is on its way to or from the store; and another goes on with what it had."""
    with (
        ValkeyServer(tmp_path) as server,
        InProcessPipeline(Addresses(pipeline=pipeline.name, stream_url=server.url)) as line,
    ):
        line.send_requests(*work())
        line.run_prefill(1)
        line.send_requests(*work())
        workers = (line.prefill, line.decode)
        for worker in workers:
            run_until_running(worker)
        server.kill()
        for worker in workers:
            with pytest.raises((redis.ConnectionError, BusUnavailable)):
                run_forever(worker)
            worker.abandon()
            assert core_of(worker).num_free_blocks == core_of(worker).pool.num_blocks
            assert not core_of(worker).staging.count_pins()
            assert not worker.engine.has_work()
            serving_engine(worker).store.close()  # what comes after it opens its own
        server.start()
        line.add_prefill("prefill-0")
        line.add_decode("decode-0")
        assert {result.error for result in line.run_until_results(2 * NUM_REQUESTS)} == {None}


def run_forever(worker: WorkerLoop) -> NoReturn:
    while True:
        worker.run_once()


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
    assert reading.result().token_ids == answers()[-1].token_ids


def test_workers_leave_soon_while_redis_hangs(embedded: Site) -> None:
    """The last of its stack."""
    embedded.wait_ready()
    with hanging(embedded.redis.pid):
        leave(embedded)
