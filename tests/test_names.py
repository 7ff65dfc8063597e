"""Names: topics, keys and event ids."""

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock import names
from penstock.errors import InvalidName
from penstock.names import (
    MAX_ID_CHARS,
    START_HASH,
    Pipeline,
    event_id,
    is_request_id,
    kv_key,
    parse_event_id,
    pipeline_of_worker,
    roll_hash,
)

HOSTILE = [
    "", " ", "a b", "-a", "_a", ".a", "a/b", "a\n", "\na", "a\r\nb", "a\x00b", "{a}", "a}b", "a*", "a?", "[a]", "a$",
    "ä", "\u0661", "\u202ea", "a" * 1000, "../a", "a;b", "a,b",
]  # fmt: skip
PIPELINES = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}", fullmatch=True)
IDS = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}", fullmatch=True)
TOKENS = st.integers(0, 2**31 - 1)


@pytest.mark.parametrize("name", [*HOSTILE, "a.b", "a:b", "a" * 65])
def test_hostile_pipelines_are_refused(name: str) -> None:
    with pytest.raises(InvalidName):
        Pipeline(name)


@pytest.mark.proof
def test_request_ids() -> None:
    assert all(map(is_request_id, ("a", "7", "A.b_c:d-e", "a" * MAX_ID_CHARS)))
    assert [name for name in (*HOSTILE, "a" * (MAX_ID_CHARS + 1)) if is_request_id(name)] == []


@pytest.mark.proof
@given(PIPELINES)
def test_topics_are_legal_in_kafka_and_all_different(name: str) -> None:
    topics = Pipeline(name).all_topics()
    assert len(topics) == len(set(topics)) == 6
    assert all(len(topic) <= 249 and set(topic) <= set("._-") | set(map(chr, range(128))) for topic in topics)
    assert all(part.isalnum() for topic in topics for part in topic.replace("-", "").replace("_", "").split("."))


@given(PIPELINES, PIPELINES, IDS, IDS)
def test_keys_of_different_requests_are_different(one: str, two: str, first: str, second: str) -> None:
    def keys(pipeline: str, request_id: str) -> set[str]:
        of = Pipeline(pipeline)
        return {of.record_key(request_id), of.log_key(request_id), of.live_channel(request_id)}

    assert len(keys(one, first)) == 3
    assert (keys(one, first) == keys(two, second)) == ((one, first) == (two, second))
    if (one, first) != (two, second):
        assert keys(one, first).isdisjoint(keys(two, second))


def test_kv_keys() -> None:
    assert kv_key(b"\x00\xff") == "penstock:kv:00ff"


# Event ids.


@pytest.mark.proof
@given(st.integers(0, 10**9 - 1), TOKENS)
def test_event_ids_round_trip(position: int, token: int) -> None:
    rolled = roll_hash(START_HASH, token)
    text = event_id(position, rolled)
    assert parse_event_id(text) == (position, rolled)
    assert event_id(*parse_event_id(text)) == text


@pytest.mark.parametrize(
    "text",
    [
        "", "-", "0", "0-", f"-{START_HASH}", f"-1-{START_HASH}", f"+1-{START_HASH}", f"0-{START_HASH}0",
        f"0-{START_HASH[1:]}", f"0-{START_HASH}\n", f" 0-{START_HASH}", f"00-{START_HASH}", f"1e3-{START_HASH}",
        f"1_0-{START_HASH}", f"{10**9}-{START_HASH}", f"\u0663-{START_HASH}", "0-ABCDEFABCDEFABCD",
        "0-gggggggggggggggg", f"0-{START_HASH}-0", "0-0x00000000000000",
    ],
)  # fmt: skip
def test_what_is_no_event_id_is_refused(text: str) -> None:
    with pytest.raises(InvalidName):
        parse_event_id(text)


@given(st.text())
def test_any_text_is_an_event_id_or_an_invalid_name(text: str) -> None:
    try:
        position, rolled = parse_event_id(text)
    except InvalidName:
        return
    assert event_id(position, rolled) == text


# The rolling hash.


def chain(tokens: list[int]) -> list[str]:
    rolled = [START_HASH]
    for token in tokens:
        rolled.append(roll_hash(rolled[-1], token))
    return rolled[1:]


@pytest.mark.proof
def test_the_rolling_hash_is_what_the_protocol_says() -> None:
    """Stored logs and foreign readers rely on these values."""
    assert chain([302, 17, 4]) == ["f816e6a17711cef4", "67d53d841f204f56", "108655e99ff8868d"]
    assert roll_hash(START_HASH, 302) == hashlib.sha256(bytes(8) + bytes([0, 0, 1, 46])).hexdigest()[:16]


@given(st.lists(TOKENS, min_size=1, max_size=8), st.data())
def test_the_hash_covers_every_token_up_to_its_position(tokens: list[int], data: st.DataObject) -> None:
    place = data.draw(st.integers(0, len(tokens) - 1))
    other = data.draw(TOKENS.filter(lambda token: token != tokens[place]))
    before, after = chain(tokens), chain([*tokens[:place], other, *tokens[place + 1 :]])
    assert before[:place] == after[:place]
    assert all(one != two for one, two in zip(before[place:], after[place:], strict=True))


@given(PIPELINES, st.sampled_from(names.STAGES), st.text(min_size=1))
def test_a_heartbeat_key_says_its_pipeline(pipeline: str, stage: str, name: str) -> None:
    assert pipeline_of_worker(Pipeline(pipeline).worker_key(stage, name)) == pipeline


@pytest.mark.parametrize("key", ["", "penstock:workers", "penstock:a b:worker:decode:d", "penstock:demo:left:decode:d"])
def test_other_keys_are_no_heartbeats(key: str) -> None:
    with pytest.raises(InvalidName):
        pipeline_of_worker(key)
