"""Reading streams from a real server while a scripted worker writes them."""

import threading
from collections.abc import Callable, Iterator

import pytest
import redis

from penstock.client import Client
from penstock.client.core import Event
from penstock.errors import Cancelled, InvalidName, PromptTooLong, StreamDiverged, StreamExpired, StreamTimeout
from penstock.messages import EndEvent, ErrorInfo, TokenEvent
from penstock.names import Pipeline, event_id
from penstock.record import AsyncTokenLog, Claim, Record, TokenLog
from penstock.record.live import MAX_MAILBOX_EVENTS
from sim.waiting import wait_for
from tests.record.play import decode, end, prefill, say

WORDS = [11, 22, 33, 44, 55]


def tokens_of(events: list[Event]) -> list[int]:
    return [event.token for event in events if isinstance(event, TokenEvent)]


def write(record: Record, tokens: list[int], request_id: str = "r1") -> Claim:
    claim = decode(record, request_id)
    say(record, claim, tokens)
    return claim


def whole(record: Record, request_id: str = "r1") -> list[Event]:
    record.finish_request(write(record, WORDS, request_id), end())
    return record.read_log(request_id)


def wait_for_readers(server: "redis.Redis", pipeline: Pipeline, count: int) -> None:
    channel = pipeline.live_channel("r1").encode()
    wait_for(lambda: dict(server.pubsub_numsub(channel))[channel] == count, "they are subscribed")


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

    def wait(self, done: Callable[[list[Event]], bool]) -> None:
        wait_for(lambda: done(self.events), "so many events")

    def join(self) -> list[Event]:
        self._thread.join()
        if self.error is not None:
            raise self.error
        return self.events


def test_a_finished_stream_is_read_from_the_log(client: Client, record: Record) -> None:
    events = whole(record)
    assert list(client.stream("r1")) == events
    answer = client.result("r1")
    assert (answer.token_ids, answer.text) == (WORDS, "<11><22><33><44><55>")
    assert (answer.finish_reason, answer.usage.completion_tokens) == ("stop", 5)


def test_every_event_id_can_be_resumed_from(client: Client, record: Record) -> None:
    *tokens, last = whole(record)
    for position, event in enumerate(tokens):
        assert isinstance(event, TokenEvent)
        assert list(client.stream("r1", after=event.id)) == [*tokens[position + 1 :], last]


def test_a_reader_may_come_before_the_first_token(
    client: Client, record: Record, server: "redis.Redis", pipeline: Pipeline
) -> None:
    reading = Reading(client.stream("r1"))
    wait_for_readers(server, pipeline, 1)
    claim = decode(record)
    for count, token in enumerate(WORDS, 1):  # each is seen before the next is written
        say(record, claim, [token])
        reading.wait(lambda events, n=count: len(events) == n)  # type: ignore[misc]
    record.finish_request(claim, end())
    assert reading.join() == record.read_log("r1")
    wait_for_readers(server, pipeline, 0)


def test_a_reader_that_stops_early_leaves_nothing_behind(
    client: Client, record: Record, server: "redis.Redis", pipeline: Pipeline
) -> None:
    write(record, WORDS)
    stream = client.stream("r1")
    assert tokens_of([next(stream), next(stream)]) == WORDS[:2]
    stream.close()  # type: ignore[attr-defined]
    if isinstance(client, Client):
        wait_for_readers(server, pipeline, 0)
    assert tokens_of([next(client.stream("r1"))]) == WORDS[:1]


def test_a_gap_is_filled_from_the_log(
    client: Client, record: Record, server: "redis.Redis", pipeline: Pipeline
) -> None:
    reading = Reading(client.stream("r1"))
    claim = write(record, WORDS[:1])
    reading.wait(lambda events: len(events) == 1)
    log_unpublished(server, pipeline, claim, WORDS[1])
    again = decode_again(record, claim)
    say(record, again, WORDS[2:])
    record.finish_request(again, end())
    assert tokens_of(reading.join()) == WORDS


def log_unpublished(server: "redis.Redis", pipeline: Pipeline, claim: Claim, token: int) -> None:
    """A token gets into the log and not to the live readers: so it looks when a connection lost the message."""
    event, position = claim.next_event(token, ""), claim.num_tokens
    server.xadd(pipeline.log_key("r1"), {"e": event.encode()}, id=f"{position}-1")
    rolled = event.id.partition("-")[2]
    server.hset(pipeline.record_key("r1"), mapping={"tokens": position + 1, "hash": rolled})


def decode_again(record: Record, claim: Claim) -> Claim:
    record.release_claim(claim)
    return decode(record, claim.id)


def test_a_live_event_before_the_first_log_reading_is_not_dropped(
    client: Client, record: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    reading = Reading(client.stream("r1"))
    wait_for(failed.is_set, "reading the log fails")
    record.finish_request(write(record, WORDS), end())
    assert tokens_of(reading.join()) == WORDS


@pytest.mark.parametrize("kinds", [["pubsub"], ["pubsub", "normal"]])
def test_a_killed_connection_loses_nothing(
    client: Client, record: Record, server: "redis.Redis", kinds: list[str]
) -> None:
    reading = Reading(client.stream("r1"))
    claim = decode(record)
    for count, token in enumerate(WORDS, 1):
        for kind in kinds:
            server.client_kill_filter(_type=kind, skipme=True)
        say(record, claim, [token])
        reading.wait(lambda events, n=count: len(events) == n)  # type: ignore[misc]
    record.finish_request(claim, end())
    assert tokens_of(reading.join()) == WORDS


def test_a_reader_that_takes_nothing_for_long_gets_it_all_from_the_log(
    client: Client, record: Record, server: "redis.Redis", pipeline: Pipeline
) -> None:
    count = 3 * MAX_MAILBOX_EVENTS
    claim = write(record, [0])
    stream = client.stream("r1")
    first = next(stream)
    for token in range(1, count):
        record.send_tokens([(claim, claim.next_event(token, ""))])
    assert all(record.collect_outcomes())
    record.finish_request(claim, end())
    assert tokens_of([first, *stream]) == list(range(count))


def test_a_silence_is_looked_up_in_the_log(
    client: Client, record: Record, server: "redis.Redis", pipeline: Pipeline
) -> None:
    reading = Reading(client.stream("r1"))
    wait_for_readers(server, pipeline, 1)
    claim = write(record, WORDS[:1])
    reading.wait(lambda events: len(events) == 1)
    log_unpublished(server, pipeline, claim, WORDS[1])
    reading.wait(lambda events: len(events) == 2)
    record.finish_request(decode_again(record, claim), end())
    assert tokens_of(reading.join()) == WORDS[:2]


def test_nothing_within_the_patience_is_a_timeout(client: Client, record: Record) -> None:
    with pytest.raises(StreamTimeout):
        list(client.stream("never", timeout_s=0.05))
    write(record, WORDS[:1])
    with pytest.raises(StreamTimeout):
        list(client.stream("r1", timeout_s=0.05))


def test_a_log_that_is_gone_is_expired(
    client: Client, record: Record, server: "redis.Redis", pipeline: Pipeline
) -> None:
    with pytest.raises(StreamExpired):
        list(client.stream("never", after=event_id(3, "0" * 16)))
    write(record, WORDS)
    stream = client.stream("r1", timeout_s=0.05)
    assert tokens_of([next(stream) for _ in WORDS]) == WORDS
    server.delete(pipeline.log_key("r1"), pipeline.record_key("r1"))
    with pytest.raises(StreamExpired):
        next(stream)


def test_a_log_begun_again_with_other_tokens_has_diverged(
    client: Client, record: Record, server: "redis.Redis", pipeline: Pipeline
) -> None:
    reading = Reading(client.stream("r1"))
    write(record, WORDS)
    reading.wait(lambda events: len(events) == 5)
    last = reading.events[2]
    assert isinstance(last, TokenEvent)
    with server.pipeline(transaction=True) as lost:
        lost.delete(pipeline.log_key("r1"), pipeline.record_key("r1"))
        lost.hset(pipeline.record_key("r1"), "stage", "new")  # a record is there whenever the reader looks
        lost.execute()
    write(record, [11, 99, 98, 97, 96])
    with pytest.raises(StreamDiverged):
        reading.join()
    with pytest.raises(StreamDiverged):
        list(client.stream("r1", after=last.id))


def test_a_log_begun_again_with_the_same_tokens_is_waited_for(
    client: Client, record: Record, server: "redis.Redis", pipeline: Pipeline
) -> None:
    seen = list(client.stream("r1", after=None)) if whole(record) else []
    server.delete(pipeline.log_key("r1"), pipeline.record_key("r1"))
    claim = write(record, WORDS[:1])
    third = seen[2]
    assert isinstance(third, TokenEvent)
    reading = Reading(client.stream("r1", after=third.id))
    wait_for_readers(server, pipeline, 1)
    say(record, claim, WORDS[1:])
    record.finish_request(claim, end())
    assert tokens_of(reading.join()) == WORDS[3:]


def test_an_end_with_an_error_raises_it_after_the_tokens(client: Client, record: Record) -> None:
    claim = write(record, WORDS[:2])
    error = ErrorInfo.from_error(PromptTooLong("too long by far"))
    record.finish_request(claim, EndEvent(finish_reason="error", error=error))
    stream = client.stream("r1")
    assert tokens_of([next(stream), next(stream)]) == WORDS[:2]
    with pytest.raises(PromptTooLong, match="too long by far"):
        next(stream)
    with pytest.raises(PromptTooLong):
        client.result("r1")


def test_cancelling_is_seen_by_the_worker_and_then_by_the_reader(client: Client, record: Record) -> None:
    assert client.cancel("r1")
    claim = prefill(record)
    assert claim.is_cancelled
    record.finish_request(claim, EndEvent(finish_reason="cancelled", error=ErrorInfo.from_error(Cancelled("as asked"))))
    with pytest.raises(Cancelled):
        client.result("r1")
    assert not client.cancel("r1")


def test_two_readers_of_one_stream_and_one_of_another(
    redis_url: str, record: Record, server: "redis.Redis", pipeline: Pipeline
) -> None:
    with Client(redis=redis_url, pipeline=pipeline.name) as client:
        readings = [Reading(client.stream(request_id)) for request_id in ("r1", "r1", "r2")]
        wait_for_readers(server, pipeline, 1)  # one connection, however many readers
        first, second = decode(record, "r1"), decode(record, "r2")
        for token in WORDS:
            say(record, first, [token])
            say(record, second, [token + 1])
        record.finish_request(first, end())
        record.finish_request(second, end())
        seen = [tokens_of(reading.join()) for reading in readings]
    assert seen == [WORDS, WORDS, [token + 1 for token in WORDS]]


def test_an_event_id_is_checked(client: Client) -> None:
    with pytest.raises(InvalidName):
        list(client.stream("r1", after="nonsense"))
