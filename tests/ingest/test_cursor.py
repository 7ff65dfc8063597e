"""A stream's pieces and their ids: whoever comes back with any of them gets the rest, each piece once."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.client.core import Event
from penstock.errors import Cancelled, StreamDiverged
from penstock.ingest.errors import ApiError
from penstock.ingest.openai import CHAT, COMPLETIONS, RESPONSES, ApiEndpoint, StreamMeta, make_stream_meta
from penstock.ingest.openai.cursor import SentEvent, SseCursor
from penstock.ingest.openai.sse import ResumePoint, make_token_positions
from penstock.ingest.streaming.sse import encode_frames
from penstock.messages import EndEvent, ErrorInfo, TokenEvent, Usage
from tests.draws import mark_some
from tests.ingest.answers import make_log

TURNS = [{"role": "user", "content": "hi"}]
TEXTS = ["a", "", "b c", "", "", "d"]
CASES: dict[str, tuple[ApiEndpoint[Any], dict[str, Any]]] = {
    "chat": (CHAT, {"messages": TURNS}),
    "chat of three": (CHAT, {"messages": TURNS, "n": 3, "stream": True, "stream_options": {"include_usage": True}}),
    "completions": (COMPLETIONS, {"prompt": ["x", "y"], "stream": True, "stream_options": {"include_usage": True}}),
    "logprobs": (COMPLETIONS, {"prompt": "x", "logprobs": 1}),
    "responses": (RESPONSES, {"input": "hi"}),
}


def make_meta(endpoint: ApiEndpoint[Any], body: dict[str, Any]) -> StreamMeta:
    return make_stream_meta(endpoint, endpoint.parse_body({"model": "demo"} | body), f"{endpoint.id_prefix}1")


def log_of(seed: int, with_logprobs: bool = False) -> list[Event]:
    """A whole stream: tokens, some of them without text, and the end."""
    return make_log(TEXTS, "!", "length", has_logprobs=with_logprobs, seed=seed)


def send_events(
    endpoint: ApiEndpoint[Any], made: StreamMeta, order: list[int], after: str | None = None
) -> list[SentEvent]:
    """All that a reader is told whose choices' events come in this order, as far as it goes, then one by one."""
    cursor = SseCursor(endpoint, made, ResumePoint(len(made.request_ids), after))
    logs = [iter(log_of(index, with_logprobs="logprobs" in made.options)) for index in range(len(made.request_ids))]
    found = cursor.open_stream()
    for place in [*order, *sorted(list(range(len(logs))) * (len(TEXTS) + 1))]:
        event = next(logs[place % len(logs)], None)
        if event is not None:
            found += cursor.add_event(place % len(logs), event)
    assert cursor.has_ended
    return found + cursor.end_stream()


def by_choice(pieces: list[SentEvent]) -> dict[Any, list[str]]:
    """What was said of each choice, in order; of none, under None."""
    texts: dict[Any, list[str]] = {}
    for _, piece in pieces:
        choices = json.loads(piece.data).get("choices", [{"index": 0}]) if piece.data != "[DONE]" else []
        texts.setdefault(choices[0]["index"] if choices else None, []).append(piece.data)
    return texts


@pytest.mark.parametrize("case", mark_some(CASES, pytest.mark.proof, 2))
@given(first=st.lists(st.integers(0, 5), max_size=20), second=st.lists(st.integers(0, 5), max_size=20), data=st.data())
def test_any_id_can_be_resumed_from(case: str, first: list[int], second: list[int], data: st.DataObject) -> None:
    endpoint, body = CASES[case]
    made = make_meta(endpoint, body)
    whole = send_events(endpoint, made, first)
    ids = [one.id for one in whole if one.id]
    assert len(set(ids)) == len(ids)
    assert [ResumePoint(len(made.request_ids), one).is_over for one in (None, ids[-1])] == [False, True]
    seen = whole[: cut_of(data, whole)]
    rest = send_events(endpoint, made, second, after=seen[-1].id)
    assert by_choice(seen + rest) == by_choice(whole)
    if len(rest) > 1 and rest[0].id:
        seen += rest[: cut_of(data, rest)]
        last = send_events(endpoint, made, first, after=seen[-1].id)
        assert by_choice(seen + last) == by_choice(whole)


def cut_of(data: st.DataObject, pieces: list[SentEvent]) -> int:
    """How many pieces a reader had of these, the last one with an id."""
    return data.draw(st.sampled_from([place for place in range(1, len(pieces)) if pieces[place - 1].id]))


@pytest.mark.parametrize("case", ["chat of three", "completions"])
def test_the_usage_has_no_id_and_comes_again_until_it_is_over(case: str) -> None:
    endpoint, body = CASES[case]
    made = make_meta(endpoint, body)
    *_, end, usage, done = send_events(endpoint, made, [])
    assert "usage" in json.loads(usage.event.data)
    assert (usage.id, done.id) == ("", "done")
    assert b"id:" not in encode_frames([usage])
    assert send_events(endpoint, made, [], after=end.id) == [usage, done]


def test_another_answer_than_was_seen_is_told() -> None:
    made = make_meta(COMPLETIONS, {"prompt": "x"})
    seen = send_events(COMPLETIONS, made, [])[0].id
    cursor = SseCursor(COMPLETIONS, made, ResumePoint(1, seen))
    first, *_ = log_of(seed=7)
    with pytest.raises(StreamDiverged):
        cursor.add_event(0, first)
    shorter = SseCursor(COMPLETIONS, made, ResumePoint(1, seen))
    with pytest.raises(StreamDiverged):
        shorter.add_event(0, EndEvent(finish_reason="stop", usage=Usage(completion_tokens=0)))


def test_a_token_of_several_events_is_resumed_between_them() -> None:
    event = log_of(seed=0)[0]
    assert isinstance(event, TokenEvent)
    positions = make_token_positions(event.id, 3)
    assert positions[-1] == event.id
    for count, seen in enumerate(positions, 1):
        point = ResumePoint(1, seen)
        point.check_token(0, event)
        assert [one for one in positions if point.advance_past(0, one) == one] == positions[count:]
    point = ResumePoint(1, make_token_positions("0-0000000000000000", 2)[0])
    with pytest.raises(StreamDiverged):
        point.check_token(0, event)


def test_an_end_with_an_error_raises_it() -> None:
    cursor = SseCursor(COMPLETIONS, make_meta(COMPLETIONS, {"prompt": "x"}), ResumePoint(1))
    with pytest.raises(Cancelled):
        cursor.add_event(0, EndEvent(finish_reason="cancelled", error=ErrorInfo(code="cancelled", message="so")))


@pytest.mark.parametrize(
    "text",
    [
        "x", "u", "0-12", "1,2", "e1,e1,e1", ",", "s0", "0-f816e6a17711cef4\r\nx: y", "e100000", "Done", "s1.1", "e1.1",
        "0-f816e6a17711cef4.0",
    ],
)  # fmt: skip
def test_what_cannot_be_an_id_is_an_error(text: str) -> None:
    with pytest.raises(ApiError) as refused:
        ResumePoint(1, text)
    assert (refused.value.status, refused.value.param) == (400, "last_event_id")


def test_a_place_in_one_choice_is_not_lost_while_another_one_is_told() -> None:
    """Read again from the beginning, the first events are the other choice's: their ids keep what was seen of one."""
    made = make_meta(COMPLETIONS, {"prompt": "x", "n": 2})
    seen = next(one.id for one in send_events(COMPLETIONS, made, [1] * 7) if one.id.endswith(",e1"))
    rest = send_events(COMPLETIONS, made, [0] * 7, after=seen)
    assert all(one.id.endswith(",e1") for one in rest[:-1])
