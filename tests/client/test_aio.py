"""What only the asyncio client can show: many at once on one loop."""

import asyncio
from collections.abc import Sequence
from concurrent.futures import Future

import pytest
import redis

from penstock.bus.contract import Outgoing, create_started_future, wait_until_acknowledged
from penstock.client import AsyncClient
from penstock.errors import BusUnavailable, StreamTimeout
from penstock.names import Pipeline
from penstock.record import Record
from penstock.record.log import RequestStatus
from sim.waiting import PATIENCE_S
from tests.record.play import decode, end, prefill, say, tokens_of


@pytest.mark.proof
async def test_many_streams_share_one_connection(
    redis_url: str, server: "redis.Redis", pipeline: Pipeline, record: Record
) -> None:
    async with AsyncClient(redis=redis_url, pipeline=pipeline.name) as client:
        ids = [f"r{i % 10}" for i in range(20)]
        readings = [asyncio.create_task(client.result(request_id)) for request_id in ids]
        channels = [pipeline.live_channel(request_id) for request_id in ids[:10]]
        while not all(count == 1 for _, count in server.pubsub_numsub(*channels)):
            await asyncio.sleep(0)
        claims = [decode(record, request_id) for request_id in ids[:10]]
        for token in range(5):
            record.append_tokens([(claim, claim.next_event(token, "x")) for claim in claims])
            await asyncio.sleep(0)
        for claim in claims:
            record.finish_request(claim, end())
        assert [(await reading).token_ids for reading in readings] == [[0, 1, 2, 3, 4]] * 20


async def test_a_cancelled_reader_disturbs_no_other(
    redis_url: str, server: "redis.Redis", pipeline: Pipeline, record: Record
) -> None:
    async with AsyncClient(redis=redis_url, pipeline=pipeline.name) as client:
        left, stays = (asyncio.create_task(client.result("r1")) for _ in range(2))
        claim = decode(record, "r1")
        say(record, claim, [1])
        left.cancel()
        await asyncio.gather(left, return_exceptions=True)
        say(record, claim, [2])
        record.finish_request(claim, end())
        assert (await stays).token_ids == [1, 2]


class FailingOnce(AsyncClient):
    """A client whose server is away when it asks for a request's record for the first time."""

    has_failed = False

    async def status(self, request_id: str) -> RequestStatus | None:
        if not self.has_failed:
            self.has_failed = True
            raise BusUnavailable("away")
        return await super().status(request_id)


async def test_news_wait_out_an_outage_in_which_no_record_can_be_read(
    redis_url: str, pipeline: Pipeline, record: Record
) -> None:
    claim = prefill(record, "r1", body="b")
    say(record, claim, [1, 2])
    record.finish_request(claim, end())
    async with FailingOnce(redis=redis_url, pipeline=pipeline.name) as client:
        batches = [batch async for batch in client.stream_batches("r1", body="b")]
        assert client.has_failed
        events = [event for batch in batches for event in batch]
        assert tokens_of(events) == [1, 2]
        assert len(events) == 3
        client.has_failed = False
        with pytest.raises(StreamTimeout):
            async for _ in client.stream_batches("r1", body="b", timeout_s=0.0):
                pass


class SlowPublisher:
    """Stands for a publisher, one of whose partitions has no leader: its messages stay open until they time out."""

    def __init__(self) -> None:
        self.open: list[Future[str]] = []

    def send_messages(self, messages: Sequence[Outgoing]) -> list[Future[str]]:
        sent = [create_started_future() for _ in messages]
        for message, future in zip(messages, sent, strict=True):
            if b"stuck" in message.value:
                self.open.append(future)
            else:
                future.set_result("a place")
        return sent

    def publish(self, messages: Sequence[Outgoing]) -> list[str]:
        return wait_until_acknowledged(self.send_messages(messages), PATIENCE_S)

    def close(self) -> None:
        pass


async def test_a_message_that_is_not_acknowledged_holds_up_and_fails_no_other(
    redis_url: str, pipeline: Pipeline
) -> None:
    async with AsyncClient(redis=redis_url, pipeline=pipeline.name) as client:
        client._publisher = slow = SlowPublisher()
        asked = [asyncio.create_task(client.submit("stuck" if n % 4 == 0 else "well")) for n in range(20)]
        well = [task for n, task in enumerate(asked) if n % 4]
        await asyncio.gather(*well)
        await client.submit("later")
        stuck, given_up = asked[::4], asked[4]
        assert not any(task.done() for task in stuck)
        given_up.cancel()
        for future in slow.open:
            future.set_exception(BusUnavailable("timed out"))
        found = await asyncio.gather(*stuck, return_exceptions=True)
    assert [type(one) for one in found] == [BusUnavailable, asyncio.CancelledError] + [BusUnavailable] * 3
