"""The stream reader: whatever the live channel drops, repeats or delays, the sequence comes out exact."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.client.core import MIN_KEPT_HASHES, Event, ReadLog, ReadStatus, StreamReader, TakeLive, read_stream
from penstock.errors import StreamDiverged
from penstock.messages import EndEvent, TokenEvent, Usage
from penstock.names import START_HASH, roll_hash
from penstock.record.log import RequestStatus
from tests.record.play import id_of


def stream_of(tokens: list[int]) -> list[Event]:
    rolled, events = START_HASH, list[Event]()
    for position, token in enumerate(tokens):
        rolled = roll_hash(rolled, token)
        events.append(TokenEvent.at_position(position, rolled, token, f"<{token}>"))
    return [*events, EndEvent(finish_reason="stop", usage=Usage(completion_tokens=len(tokens)))]


def log_of(events: list[Event], reader: StreamReader) -> list[Event]:
    return events[reader.log_after + 1 :]


@given(st.data())
def test_any_interleaving_gives_every_event_once(data: st.DataObject) -> None:
    events = stream_of(data.draw(st.lists(st.integers(0, 2**31 - 1), max_size=12)))
    written, start = 0, data.draw(st.integers(0, len(events) - 1))
    reader, got = StreamReader(id_of(events[start - 1]) if start else None), list[Event]()
    for action in data.draw(st.lists(st.sampled_from(["write", "live", "old", "log"]), max_size=60)):
        if action == "write":  # into the log; its live event is dropped
            written = min(written + 1, len(events))
        elif action == "live" and written < len(events):
            written += 1
            got += reader.feed_live(events[written - 1])
        elif action == "old" and written:  # late, or twice
            got += reader.feed_live(events[data.draw(st.integers(0, written - 1))])
        elif action == "log":
            got += reader.feed_log(log_of(events[:written], reader))
            assert not reader.is_behind
        assert got == events[start : start + len(got)]
    got += reader.feed_log(log_of(events, reader))
    assert got == events[start:]
    assert reader.end == events[-1]
    assert reader.feed_live(events[0]) == []


@given(st.lists(st.integers(0, 9), min_size=1, max_size=8), st.data())
def test_another_stream_is_noticed_at_its_first_other_token(tokens: list[int], data: st.DataObject) -> None:
    changed = data.draw(st.integers(0, len(tokens) - 1))
    others = [*tokens[:changed], tokens[changed] + 1, *tokens[changed + 1 :]]
    seen = data.draw(st.integers(changed + 1, len(tokens)))
    ours, theirs = stream_of(tokens), stream_of(others)
    with pytest.raises(StreamDiverged):
        StreamReader(id_of(ours[seen - 1])).feed_log(theirs[seen - 1 :])
    if seen < len(tokens):
        with pytest.raises(StreamDiverged):
            StreamReader(id_of(ours[seen - 1])).feed_live(theirs[seen])
    reader = StreamReader()
    reader.feed_log(ours[:seen])
    with pytest.raises(StreamDiverged):
        reader.feed_live(theirs[changed])


def test_a_gap_asks_for_the_log_from_the_last_token_seen() -> None:
    events = stream_of([1, 2, 3])
    reader = StreamReader()
    assert (reader.is_behind, reader.log_after) == (True, -1)
    assert reader.feed_log(events[:1]) == events[:1]
    assert reader.feed_live(events[2]) == []
    assert (reader.is_behind, reader.log_after) == (True, -1)
    assert reader.feed_log(events[:3]) == events[1:3]
    assert (reader.is_behind, reader.log_after) == (False, 1)
    early = StreamReader(id_of(events[0]))
    early.feed_log(events[:1])
    assert early.feed_live(events[3]) == []
    assert early.is_behind


def test_a_log_without_what_was_seen_is_missing() -> None:
    events = stream_of([1, 2])
    fresh, resumed = StreamReader(), StreamReader(id_of(events[1]))
    fresh.feed_log([])
    resumed.feed_log([])
    assert (fresh.is_log_missing, resumed.is_log_missing) == (False, True)
    resumed.feed_log(events[1:])
    assert not resumed.is_log_missing


def test_a_log_that_ends_too_early_or_has_a_hole_is_another_one() -> None:
    with pytest.raises(StreamDiverged, match="ended after 1"):
        StreamReader(id_of(stream_of([1, 2])[1])).feed_live(stream_of([1])[-1])
    with pytest.raises(StreamDiverged, match="hole"):
        StreamReader().feed_log(stream_of([1, 2])[1:])


def test_the_last_part_of_a_long_stream_is_still_known() -> None:
    events = stream_of(list(range(5 * MIN_KEPT_HASHES)))
    reader = StreamReader()
    assert reader.feed_log(events[:-1]) == events[:-1]
    assert reader.num_tokens == 5 * MIN_KEPT_HASHES
    assert reader.feed_live(events[0]) == []
    assert reader.feed_live(events[-2]) == []
    other = TokenEvent.at_position(5 * MIN_KEPT_HASHES - 1, "0" * 16, 1, "")
    with pytest.raises(StreamDiverged):
        reader.feed_live(other)


def test_nobody_listens_to_a_stream_whose_log_has_its_end() -> None:
    events = stream_of([1, 2, 3])
    steps = read_stream("r1", StreamReader(), 5.0, begins_with_log=True)
    assert next(steps) == ReadLog(-1)
    assert steps.send(events) == events
    assert list(steps) == []


def test_what_the_log_lacks_is_listened_for_and_the_log_read_again() -> None:
    events = stream_of([1, 2, 3])
    steps = read_stream("r1", StreamReader(), 5.0, begins_with_log=True)
    assert next(steps) == ReadLog(-1)
    assert steps.send(events[:2]) == events[:2]
    assert isinstance(next(steps), TakeLive)
    assert steps.send(([], True)) == ReadLog(0)
    assert steps.send(events[1:]) == events[2:]
    assert list(steps) == [[]]


def test_each_silence_is_twice_as_long_until_something_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s, waits_s = 100.0, list[float]()
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    steps = read_stream("r1", StreamReader(), 100.0)
    step = next(steps)

    def pass_silence(log: list[Event], *, is_cut_short: bool = False) -> None:
        nonlocal now_s, step
        assert isinstance(step, TakeLive)
        waits_s.append(step.timeout_s)
        now_s += 0.0 if is_cut_short else step.timeout_s
        assert isinstance(steps.send(([], True)), ReadLog)
        found = steps.send(log)
        if isinstance(found, ReadStatus):
            found = steps.send(RequestStatus(1, "w/1", "decode", "", "", 3, 1, cancelled=False))
        while isinstance(found, list):
            found = next(steps)
        step = found

    pass_silence([], is_cut_short=True)  # the subscription has begun
    for _ in range(6):
        pass_silence([])
    assert waits_s == pytest.approx([1, 1, 2, 4, 8, 15, 15])
    pass_silence(stream_of([1, 2, 3])[:1])
    pass_silence([])
    assert waits_s[-2:] == pytest.approx([15, 1])
    now_s += 90.0  # what is left of the patience
    pass_silence([])
    assert waits_s[-1] == pytest.approx(2)
