"""Reading streams from a real server while a scripted worker writes them."""

import threading
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import redis

from penstock.client import Client
from penstock.client.core import Event
from penstock.errors import Cancelled, InvalidName, PromptTooLong, StreamDiverged, StreamExpired, StreamTimeout
from penstock.messages import EndEvent, ErrorInfo
from penstock.names import Pipeline, event_id
from penstock.record import AsyncTokenLog, Claim, Record, TokenLog
from penstock.record.live import MAX_MAILBOX_EVENTS
from sim.waiting import wait_for
from tests.record.play import decode, end, id_of, prefill, say, tokens_of

pytestmark = pytest.mark.proof
WORDS = [11, 22, 33, 44, 55]


class Reading:
    """A stream being read on a thread of its own."""

    def __init__(self, stream: Iterator[Event]) -> None:
        self.events: list[Event] = []
        self.error: Exception | None = None
        self._stream = stream
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            for event in self._stream:
                self.events.append(event)
        except Exception as error:
            self.error = error

    def wait(self, count: int) -> None:
        wait_for(lambda: len(self.events) == count, "so many events")

    def join(self) -> list[Event]:
        self._thread.join()
        if self.error is not None:
            raise self.error
        return self.events


@dataclass
class Live:
    """The stream of the request `r1`, whose worker a test plays."""

    client: Client
    record: Record
    server: "redis.Redis"
    pipeline: Pipeline

    def read(self, after: str | None = None) -> Reading:
        return Reading(self.client.stream("r1", after=after))

    def write(self, tokens: list[int]) -> Claim:
        claim = decode(self.record)
        say(self.record, claim, tokens)
        return claim

    def whole(self) -> list[Event]:
        self.record.finish_request(self.write(WORDS), end())
        return self.record.read_log("r1")

    def wait_for_readers(self, count: int) -> None:
        channel = self.pipeline.live_channel("r1").encode()
        wait_for(lambda: dict(self.server.pubsub_numsub(channel))[channel] == count, "they are subscribed")

    def log_unpublished(self, claim: Claim, token: int) -> None:
        """A token gets into the log and not to the live readers: so it looks when a connection lost the message."""
        event, position = claim.next_event(token, ""), claim.num_tokens
        self.server.xadd(self.pipeline.log_key("r1"), {"e": event.encode()}, id=f"{position}-1")
        rolled = event.id.partition("-")[2]
        self.server.hset(self.pipeline.record_key("r1"), mapping={"tokens": position + 1, "hash": rolled})

    def decode_again(self, claim: Claim) -> Claim:
        self.record.release_claim(claim)
        return decode(self.record, claim.id)


@pytest.fixture
def live(client: Client, record: Record, server: "redis.Redis", pipeline: Pipeline) -> Live:
    return Live(client, record, server, pipeline)


def test_every_event_id_can_be_resumed_from(live: Live) -> None:
    """A finished stream is read from the log."""
    *tokens, last = live.whole()
    assert list(live.client.stream("r1")) == [*tokens, last]
    for position, event in enumerate(tokens):
        assert list(live.client.stream("r1", after=id_of(event))) == [*tokens[position + 1 :], last]
    answer = live.client.result("r1")
    assert (answer.token_ids, answer.text) == (WORDS, "<11><22><33><44><55>")
    assert (answer.finish_reason, answer.usage.completion_tokens) == ("stop", 5)


def test_a_reader_that_stops_early_leaves_nothing_behind(live: Live) -> None:
    live.write(WORDS)
    stream = live.client.stream("r1")
    assert tokens_of([next(stream), next(stream)]) == WORDS[:2]
    stream.close()  # type: ignore[attr-defined]
    if isinstance(live.client, Client):
        live.wait_for_readers(0)
    assert tokens_of([next(live.client.stream("r1"))]) == WORDS[:1]


def test_a_gap_is_filled_from_the_log(live: Live) -> None:
    reading = live.read()
    claim = live.write(WORDS[:1])
    reading.wait(1)
    live.log_unpublished(claim, WORDS[1])
    again = live.decode_again(claim)
    say(live.record, again, WORDS[2:])
    live.record.finish_request(again, end())
    assert tokens_of(reading.join()) == WORDS


def test_a_live_event_before_the_first_log_reading_is_not_dropped(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    """The log cannot be read when the subscription begins; the first token then comes live."""
    failed = threading.Event()
    read, read_async = TokenLog.read_events, AsyncTokenLog.read_events

    def fail_once() -> None:
        if not failed.is_set():
            failed.set()
            raise redis.ConnectionError("not now")

    def fragile(self: TokenLog, request_id: str, after_position: int = -1, limit: int | None = None) -> list[Event]:
        fail_once()
        return read(self, request_id, after_position, limit)

    async def fragile_async(
        self: AsyncTokenLog, request_id: str, after_position: int = -1, limit: int | None = None
    ) -> list[Event]:
        fail_once()
        return await read_async(self, request_id, after_position, limit)

    monkeypatch.setattr(TokenLog, "read_events", fragile)
    monkeypatch.setattr(AsyncTokenLog, "read_events", fragile_async)
    reading = live.read()
    wait_for(failed.is_set, "reading the log fails")
    live.record.finish_request(live.write(WORDS), end())
    assert tokens_of(reading.join()) == WORDS


@pytest.mark.parametrize("kinds", [[], ["pubsub"], ["pubsub", "normal"]])
def test_a_reader_may_come_before_the_first_token_and_a_killed_connection_loses_nothing(
    live: Live, kinds: list[str]
) -> None:
    reading = live.read()
    live.wait_for_readers(1)
    claim = decode(live.record)
    for count, token in enumerate(WORDS, 1):  # each is seen before the next is written
        for kind in kinds:
            live.server.client_kill_filter(_type=kind, skipme=True)
        say(live.record, claim, [token])
        reading.wait(count)
    live.record.finish_request(claim, end())
    assert reading.join() == live.record.read_log("r1")
    live.wait_for_readers(0)


def test_a_reader_that_takes_nothing_for_long_gets_it_all_from_the_log(live: Live) -> None:
    count = 3 * MAX_MAILBOX_EVENTS
    claim = live.write([0])
    stream = live.client.stream("r1")
    first = next(stream)
    for token in range(1, count):
        live.record.send_tokens([(claim, claim.next_event(token, ""))])
    assert all(live.record.collect_outcomes())
    live.record.finish_request(claim, end())
    assert tokens_of([first, *stream]) == list(range(count))


def test_a_silence_is_looked_up_in_the_log(live: Live) -> None:
    reading = live.read()
    live.wait_for_readers(1)
    claim = live.write(WORDS[:1])
    reading.wait(1)
    live.log_unpublished(claim, WORDS[1])
    reading.wait(2)
    live.record.finish_request(live.decode_again(claim), end())
    assert tokens_of(reading.join()) == WORDS[:2]


def test_nothing_within_the_patience_is_a_timeout(live: Live) -> None:
    with pytest.raises(StreamTimeout):
        list(live.client.stream("never", timeout_s=0.05))
    live.write(WORDS[:1])
    with pytest.raises(StreamTimeout):
        list(live.client.stream("r1", timeout_s=0.05))


def test_a_log_that_is_gone_is_expired(live: Live) -> None:
    with pytest.raises(StreamExpired):
        list(live.client.stream("never", after=event_id(3, "0" * 16)))
    live.write(WORDS)
    stream = live.client.stream("r1", timeout_s=0.05)
    assert tokens_of([next(stream) for _ in WORDS]) == WORDS
    live.server.delete(live.pipeline.log_key("r1"), live.pipeline.record_key("r1"))
    with pytest.raises(StreamExpired):
        next(stream)


@pytest.mark.parametrize("num_seen", [2, 3, 40])
def test_a_stream_that_ended_before_what_was_seen_has_diverged(live: Live, num_seen: int) -> None:
    live.record.finish_request(live.write(WORDS[:1]), end())
    with pytest.raises(StreamDiverged, match=f"after 1 of the {num_seen} tokens"):
        next(live.client.stream("r1", after=event_id(num_seen - 1, "0" * 16)))


def test_a_log_begun_again_with_other_tokens_has_diverged(live: Live) -> None:
    reading = live.read()
    live.write(WORDS)
    reading.wait(5)
    with live.server.pipeline(transaction=True) as lost:
        lost.delete(live.pipeline.log_key("r1"), live.pipeline.record_key("r1"))
        lost.hset(live.pipeline.record_key("r1"), "stage", "new")  # a record is there whenever the reader looks
        lost.execute()
    live.write([11, 99, 98, 97, 96])
    with pytest.raises(StreamDiverged):
        reading.join()
    with pytest.raises(StreamDiverged):
        list(live.client.stream("r1", after=id_of(reading.events[2])))


def test_a_log_begun_again_with_the_same_tokens_is_waited_for(live: Live) -> None:
    seen = list(live.client.stream("r1", after=None)) if live.whole() else []
    live.server.delete(live.pipeline.log_key("r1"), live.pipeline.record_key("r1"))
    claim = live.write(WORDS[:1])
    reading = live.read(id_of(seen[2]))
    live.wait_for_readers(1)
    say(live.record, claim, WORDS[1:])
    live.record.finish_request(claim, end())
    assert tokens_of(reading.join()) == WORDS[3:]


def test_an_end_with_an_error_raises_it_after_the_tokens(live: Live) -> None:
    claim = live.write(WORDS[:2])
    error = ErrorInfo.from_error(PromptTooLong("too long by far"))
    live.record.finish_request(claim, EndEvent(finish_reason="error", error=error))
    stream = live.client.stream("r1")
    assert tokens_of([next(stream), next(stream)]) == WORDS[:2]
    with pytest.raises(PromptTooLong, match="too long by far"):
        next(stream)
    with pytest.raises(PromptTooLong):
        live.client.result("r1")


def test_cancelling_is_seen_by_the_worker_and_then_by_the_reader(live: Live) -> None:
    assert live.client.cancel("r1")
    claim = prefill(live.record)
    assert claim.is_cancelled
    live.record.finish_request(
        claim, EndEvent(finish_reason="cancelled", error=ErrorInfo.from_error(Cancelled("as asked")))
    )
    with pytest.raises(Cancelled):
        live.client.result("r1")
    assert not live.client.cancel("r1")


def test_two_readers_of_one_stream_and_one_of_another(redis_url: str, live: Live) -> None:
    with Client(redis=redis_url, pipeline=live.pipeline.name) as client:
        readings = [Reading(client.stream(request_id)) for request_id in ("r1", "r1", "r2")]
        live.wait_for_readers(1)  # one connection, however many readers
        first, second = decode(live.record, "r1"), decode(live.record, "r2")
        for token in WORDS:
            say(live.record, first, [token])
            say(live.record, second, [token + 1])
        live.record.finish_request(first, end())
        live.record.finish_request(second, end())
        seen = [tokens_of(reading.join()) for reading in readings]
    assert seen == [WORDS, WORDS, [token + 1 for token in WORDS]]


def test_an_event_id_is_checked(client: Client) -> None:
    with pytest.raises(InvalidName):
        list(client.stream("r1", after="nonsense"))
