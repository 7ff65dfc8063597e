"""Messages: what goes in comes out, and whatever else arrives has its typed error."""

import contextlib
import hashlib
import json
import math
import re
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import ValidationError

from penstock import messages
from penstock.bus.contract import MAX_MESSAGE_BYTES
from penstock.errors import (
    REQUEST_ERRORS,
    InternalError,
    InvalidRequest,
    PromptTooLong,
    RequestError,
    RequestTooLarge,
    UnsupportedVersion,
)
from penstock.messages import (
    DEFAULT_MAX_TOKENS,
    MAX_ERROR_CHARS,
    MAX_LOGPROBS,
    MAX_REQUEST_BYTES,
    MAX_TOKEN_BYTES,
    ChatMessage,
    EndEvent,
    ErrorInfo,
    Job,
    Logprobs,
    Picture,
    PromptToken,
    Request,
    Result,
    Sampling,
    Timings,
    TokenEvent,
    TokenLogprob,
    Usage,
    Wire,
    compute_body_hash,
    decode_message,
    encode_request,
    extract_request_id,
    join_contents,
)
from penstock.names import CANONICAL_FORM, CLASSES, FORM_HEADER, START_HASH, is_request_id, roll_hash

GOOD: dict[str, Any] = {"v": 1, "id": "r", "prompt": "x"}


def body(**changes: Any) -> bytes:
    return json.dumps({name: value for name, value in (GOOD | changes).items() if value is not ...}).encode()


def sampling(**changes: Any) -> bytes:
    return body(sampling=changes)


NO_JSON: dict[str, bytes] = {
    "nothing": b"", "not JSON": b"{not json", "cut short": body()[:-1], "two values": body() * 2, "null": b"null",
    "an array": b"[]", "a number": b"7", "not UTF-8": b'{"v":1,"id":"r","prompt":"\xff\xfe"}',
    "UTF-16": body().decode().encode("utf-16"), "a BOM": b"\xef\xbb\xbf" + body(),
    "half a character": b'{"v":1,"id":"r","prompt":"\\ud800"}', "deep": b"[" * 100_000,
    "deep objects": b'{"v":' * 100_000,
    "deep inside": body()[:-1] + b',"messages":' + b"[" * 10_000 + b"]" * 10_000 + b"}",
    "top_k with 5000 digits": body()[:-1] + b',"sampling":{"top_k":1' + b"0" * 5000 + b"}}",
    "temperature 1e400": body()[:-1] + b',"sampling":{"temperature":1e400}}',
}  # fmt: skip
BAD_FIELDS: dict[str, list[Any]] = {
    "v": [...], "epoch": [7], "priority_class": ["batch"], "id": [..., "", "r\n", "{r}", "r" * 129, 7],
    "token_ids": [[1]], "prompt": [..., None, ""], "class": ["urgent"], "tenant": ["a\r\nb"], "model": ["m" * 257],
    "deadline": [0, math.nan, "tomorrow"],
}  # fmt: skip
"""By field what it must not be; an ellipsis stands for none."""
BAD_PROMPTS: dict[str, list[Any]] = {
    "messages": [[], [{"role": "wizard", "content": "x"}], [{"role": "user"}]],
    "token_ids": [[], [-1], [2**31], [1.5], [True]],
}
BAD_SAMPLING: dict[str, list[Any]] = {
    "beams": [4], "max_tokens": [0, "5", 2**31], "fit_context": [False], "top_k": [10**400, -1], "top_p": [0, 1.01],
    "temperature": [-0.1, math.nan, math.inf], "min_p": [-0.1, 1.01], "presence_penalty": [2.01, -1e308],
    "frequency_penalty": [-2.01, math.nan],
    "repetition_penalty": [0, 5e-324, 1e-39, 0.0099, 100.5, 1e308, math.nan, math.inf],
    "logit_bias": [
        [[1, 2]], {"1": 100.5}, {"1": math.nan}, {"1": -math.inf}, {"1": "2"}, {"the": 1}, {"-1": 1},
        {str(token): 1 for token in range(1025)},
    ],
    "logprobs": [21, -1, True], "seed": [-1, 2**63], "stop": [[""], ["x" * 257], ["x"] * 17], "prompt_logprobs": [21],
    "min_tokens": [-1], "stop_token_ids": [[1] * 65],
}  # fmt: skip
BAD_VALUES = {"field": BAD_FIELDS, "prompt": BAD_PROMPTS, "sampling": BAD_SAMPLING}


def place(where: str, name: str, value: Any) -> bytes:
    """Return a request with a value at its place; a kind of prompt in place of its prompt."""
    if where == "sampling":
        return sampling(**{name: value})
    return body(**{"prompt": ..., name: value} if where == "prompt" else {name: value})


BAD: dict[str, tuple[bytes, type[RequestError]]] = {
    **{name: (value, InvalidRequest) for name, value in NO_JSON.items()},
    **{
        f"{where} {name} {number}": (place(where, name, value), InvalidRequest)
        for where, fields in BAD_VALUES.items()
        for name, values in fields.items()
        for number, value in enumerate(values)
    },
    "logprobs of too many tokens": (sampling(logprobs=3, max_tokens=MAX_LOGPROBS // 4 + 1), InvalidRequest),
    "min_tokens above max_tokens": (sampling(min_tokens=9, max_tokens=8), InvalidRequest),
    "version 2": (body(v=2), UnsupportedVersion),
    "version 2 with new fields": (body(v=2, more=True), UnsupportedVersion),
    "version as text": (body(v="1"), UnsupportedVersion),
    "version null": (body(v=None), UnsupportedVersion),
    "too many bytes": (body(prompt="x" * MAX_REQUEST_BYTES), RequestTooLarge),
    "too many bytes, not JSON": (b"[" * (MAX_REQUEST_BYTES + 1), RequestTooLarge),
}


@pytest.mark.parametrize(("value", "error"), BAD.values(), ids=BAD)
def test_each_bad_input_has_its_typed_error(value: bytes, error: type[RequestError]) -> None:
    with pytest.raises(error) as raised:
        decode_message(Request, value)
    assert type(raised.value) is error
    assert str(raised.value)
    assert raised.value.__cause__ is None


@pytest.mark.parametrize(
    ("prefix", "words"),
    [
        (b"\x00\x00\x00\x00\x07\x00", "Avro and Protobuf serializers of a schema registry.*send JSON"),
        (b"\xef\xbb\xbf", "byte order mark.*UTF-8 without it"),
        (b"\xff\xfe", "byte order mark"),
    ],
)
def test_bytes_before_the_json_are_named(prefix: bytes, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        decode_message(Request, prefix + body())


def test_the_bytes_of_a_schema_registry_are_read_over() -> None:
    value = b"\x00\x00\x00\x00\x07" + body()
    request = decode_message(Request, value)
    assert request == decode_message(Request, body())
    assert extract_request_id(value, "another") == request.id
    assert compute_body_hash(request, value, {FORM_HEADER: CANONICAL_FORM}) == compute_body_hash(request)


@pytest.mark.proof
@given(st.binary(max_size=200))
def test_any_bytes_are_a_request_or_a_request_error(value: bytes) -> None:
    with contextlib.suppress(RequestError):
        decode_message(Request, value)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


@given(st.fixed_dictionaries({}, optional=dict.fromkeys(Request.model_json_schema()["properties"], JSON)))
def test_any_json_is_a_request_or_a_request_error(value: dict[str, Any]) -> None:
    with contextlib.suppress(RequestError):
        decode_message(Request, json.dumps(value).encode())


def test_the_largest_request_is_read() -> None:
    spare = MAX_REQUEST_BYTES - len(body(prompt=""))
    assert decode_message(Request, body(prompt="x" * spare)).prompt == "x" * spare


@pytest.mark.proof
def test_only_requests_are_limited() -> None:
    """The answer to a large prompt must fit as well."""
    ids = [2**31 - 1] * (MAX_REQUEST_BYTES // 10)
    job = Job(id="r", job="j", token_ids=ids)
    assert len(job.encode()) > MAX_REQUEST_BYTES
    assert decode_message(Job, job.encode()) == job


# Round trips.

IDS = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}", fullmatch=True)
TOKENS = st.integers(0, 2**31 - 1)
TENANTS = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", fullmatch=True)
TIMES = st.floats(0, 1e11)
COUNTS = st.integers(0, 2**31)
SPELLED = st.none() | st.lists(st.integers(0, 255), max_size=4)
LOGPROBS = st.builds(
    Logprobs,
    logprob=st.floats(-9999, 0),
    text=st.none() | st.text(max_size=9),
    bytes=SPELLED,
    top=st.lists(
        st.builds(
            TokenLogprob, token=TOKENS, logprob=st.floats(-9999, 0), text=st.none() | st.text(max_size=9), bytes=SPELLED
        ),
        max_size=20,
    ),
)
PROMPT_TOKENS = st.builds(
    PromptToken, token=TOKENS, logprob=st.none() | st.floats(-9999, 0), text=st.none() | st.text(max_size=9),
    bytes=SPELLED,
)  # fmt: skip
SAMPLINGS = st.builds(
    Sampling, temperature=st.floats(0, 100), top_k=TOKENS, top_p=st.floats(0, 1, exclude_min=True),
    min_p=st.floats(0, 1), presence_penalty=st.floats(-2, 2), frequency_penalty=st.floats(-2, 2),
    repetition_penalty=st.floats(0.01, 100),
    logit_bias=st.dictionaries(TOKENS, st.floats(-100, 100), max_size=5), seed=st.none() | st.integers(0, 2**63 - 1),
    stop=st.lists(st.text(min_size=1, max_size=256), max_size=16), stop_token_ids=st.lists(TOKENS, max_size=64),
    max_tokens=st.integers(1, 2**31 - 1), fit_context=st.sampled_from([None, True]), min_tokens=st.none() | st.just(1),
    prompt_logprobs=st.none() | st.integers(0, 20), ignore_eos=st.booleans(),
)  # fmt: skip
PROMPTS = st.one_of(
    st.fixed_dictionaries({"prompt": st.text(min_size=1)}),
    st.fixed_dictionaries({"token_ids": st.lists(TOKENS, min_size=1)}),
    st.fixed_dictionaries({"messages": st.lists(st.builds(ChatMessage, content=st.text()), min_size=1)}),
)
REQUESTS = PROMPTS.flatmap(
    lambda prompt: st.builds(
        Request,
        id=IDS,
        model=st.none() | st.text(max_size=256),
        sampling=SAMPLINGS,
        priority_class=st.none() | st.sampled_from(CLASSES),
        tenant=TENANTS,
        deadline=st.none() | st.floats(1, 1e11),
        **{name: st.just(value) for name, value in prompt.items()},
    )
)
TIMINGS = st.builds(Timings, **dict.fromkeys(Timings.model_fields, TIMES))
USAGES = st.builds(Usage, **dict.fromkeys(Usage.model_fields, COUNTS))
ERRORS = st.none() | st.builds(ErrorInfo, code=st.sampled_from(sorted(REQUEST_ERRORS)), message=st.text())
REASONS = st.sampled_from(["stop", "length", "cancelled", "error"])
JOBS = st.builds(
    Job, id=IDS, job=st.text(), token_ids=st.lists(TOKENS), sampling=SAMPLINGS, seed=st.integers(0, 2**63 - 1),
    tenant=TENANTS, priority_class=st.sampled_from(CLASSES), deadline=st.none() | TIMES, fingerprint=st.text(),
    last_block=st.text(), cached_tokens=COUNTS, timings=TIMINGS, error=ERRORS,
)  # fmt: skip
RESULTS = st.builds(
    Result, id=IDS, tenant=TENANTS, priority_class=st.sampled_from(CLASSES), model=st.text(), finish_reason=REASONS,
    text=st.text(), token_ids=st.lists(TOKENS), logprobs=st.none() | st.lists(LOGPROBS), usage=USAGES,
    prompt_tokens=st.none() | st.lists(PROMPT_TOKENS), timings=TIMINGS, error=ERRORS,
)  # fmt: skip
TOKEN_EVENTS = st.builds(
    TokenEvent.at_position, st.integers(0, 10**9 - 1), st.builds(roll_hash, st.just(START_HASH), TOKENS), TOKENS,
    st.text(), st.none() | LOGPROBS,
)  # fmt: skip
FIRST_TOKEN_EVENTS = st.builds(
    lambda event, prompt: event.model_copy(update={"prompt_tokens": prompt}), TOKEN_EVENTS, st.lists(PROMPT_TOKENS)
)
END_EVENTS = st.builds(EndEvent, finish_reason=REASONS, text=st.text(), usage=USAGES, timings=TIMINGS, error=ERRORS)


@pytest.mark.proof
@given(st.one_of(REQUESTS, JOBS, RESULTS, TOKEN_EVENTS, FIRST_TOKEN_EVENTS, END_EVENTS))
def test_what_is_encoded_is_decoded(message: Wire) -> None:
    again = decode_message(type(message), message.encode())
    assert again == message
    assert again.encode() == message.encode()


@given(REQUESTS)
def test_a_canonical_message_is_hashed_as_it_is_and_any_other_by_what_it_says(request: Request) -> None:
    """The hash is that of the request's own dump, whoever wrote it, in whatever order and with whatever spaces."""
    encoded, canonical = encode_request(request), {FORM_HEADER: CANONICAL_FORM}
    read = decode_message(Request, encoded.value)
    assert compute_body_hash(read, encoded.value, canonical) == compute_body_hash(read) == encoded.body_hash
    fields = json.loads(encoded.value)
    spaced = json.dumps(dict(reversed(fields.items())), indent=1).encode()
    again = decode_message(Request, spaced)
    assert compute_body_hash(again, spaced, {}) == compute_body_hash(again, spaced, canonical) == encoded.body_hash


def test_a_canonical_message_is_not_written_again_for_its_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    request = Request(id="r", messages=[ChatMessage(role="user", content="x")], chat_template_kwargs={"b": 1, "a": 2})
    encoded = encode_request(request)
    monkeypatch.setattr(messages, "_encode_body", None)
    assert compute_body_hash(request, encoded.value, {FORM_HEADER: CANONICAL_FORM}) == encoded.body_hash


def test_a_body_is_another_one_by_its_template_variables_but_not_by_their_order() -> None:
    def hash_with(**variables: object) -> str:
        turns = [ChatMessage(role="user", content="x")]
        return encode_request(Request(id="r", messages=turns, chat_template_kwargs=variables)).body_hash

    assert hash_with(a=1, b={"c": 2, "d": 3}) == hash_with(b={"d": 3, "c": 2}, a=1)
    assert hash_with(a=1, b={"c": 2, "d": 3}) != hash_with(a=1, b={"c": 2, "d": 4})


def test_how_long_kv_is_kept_is_no_part_of_the_body_and_not_on_the_wire_unless_asked() -> None:
    plain, asking = Request(id="r", prompt="x"), Request(id="r", prompt="x", retain_s=300)
    assert encode_request(plain).body_hash == encode_request(asking).body_hash
    assert (b"retain_s" in plain.encode(), b'"retain_s":300' in asking.encode()) == (False, True)
    assert decode_message(Request, asking.encode()) == asking
    assert b"retain_s" not in Job(id="r", job="j").encode()
    for wrong in (0, 3601):
        with pytest.raises(ValidationError):
            Request(id="r", prompt="x", retain_s=wrong)


def test_a_picture_is_named_by_its_digest_and_detail_and_travels_in_its_place() -> None:
    def ask(*content: str | Picture) -> Request:
        return Request(id="r", messages=[ChatMessage(role="user", content=list(content))])

    digest = "ab" * 32
    told = Picture(digest=digest, num_bytes=9, width=640, height=480)
    encoded = encode_request(ask("what is ", told, " this?"))
    read = decode_message(Request, encoded.value)
    assert (read, read.pictures) == (encoded.request, [told])
    assert (read.messages or [])[0].text == "what is  this?"
    assert (read.messages or [])[0].describe()["content"] == [
        {"type": "text", "text": "what is "}, {"type": "image"}, {"type": "text", "text": " this?"},
    ]  # fmt: skip
    assert compute_body_hash(read, encoded.value, {FORM_HEADER: CANONICAL_FORM}) == encoded.body_hash
    same = ask("what is ", Picture(digest=digest, data="AAAA"), " this?")
    others = [
        ask(told, "what is  this?"), ask("what is ", told.model_copy(update={"detail": "low"}), " this?"),
        ask("what is ", Picture(digest="cd" * 32), " this?"),
    ]  # fmt: skip
    assert encode_request(same).body_hash == encoded.body_hash
    assert len({encoded.body_hash, *(encode_request(one).body_hash for one in others)}) == 4
    for wrong in ([], [{"digest": digest[:-1]}], [{"digest": digest, "url": "x"}], [3]):
        with pytest.raises(InvalidRequest, match="content"):
            decode_message(
                Request, json.dumps({"v": 1, "id": "r", "messages": [{"role": "user", "content": wrong}]}).encode()
            )


def test_a_chat_of_texts_has_the_hash_that_it_had_before_there_were_pictures() -> None:
    """Workers of both versions compare it while they are replaced."""
    request = Request(id="r", messages=[ChatMessage(role="user", content="x")], chat_template_kwargs={"a": 1})
    plain = hashlib.sha256(b'"id":"r","messages":[{"role":"user","content":"x"}]\n{"a":1}').hexdigest()
    assert encode_request(request).body_hash == plain


def test_contents_are_joined_with_an_empty_line_between_them() -> None:
    picture = Picture(digest="ab" * 32)
    assert join_contents("a", "b") == "a\n\nb"
    assert join_contents([picture, "a"], "b") == [picture, "a", "\n\n", "b"]


def test_who_says_falsely_that_a_message_is_canonical_gets_no_other_bodys_answer() -> None:
    """Its bytes are hashed, so two bodies have two hashes all the same."""
    said = {FORM_HEADER: CANONICAL_FORM}
    bodies = [f'{{"v":1,"id":"r", "prompt":"{prompt}"}}'.encode() for prompt in ("one", "two")]
    hashes = {compute_body_hash(decode_message(Request, body), body, said) for body in bodies}
    assert len(hashes) == 2


@given(text=st.text())
@example("".join(map(chr, range(0x100))) + "\u2028\u2029\ufeff\uffff😀")
def test_an_event_is_written_as_pydantic_writes_it(text: str) -> None:
    event = TokenEvent.at_position(7, START_HASH, 5, text)
    assert event.encode() == Wire.encode(event)


def test_the_wire_says_class_and_leaves_out_what_is_not_given() -> None:
    encoded = json.loads(Request(id="r", prompt="x", priority_class="batch").encode())
    assert encoded["class"] == "batch"
    assert {"priority_class", "messages", "token_ids", "deadline", "model"}.isdisjoint(encoded)
    assert "sampling" not in encoded, "a worker that does not know a field refuses it, so defaults are left out"
    said = json.loads(Job(id="r", job="j").encode())["sampling"]
    assert said["max_tokens"] == DEFAULT_MAX_TOKENS == 256
    assert {"fit_context", "min_tokens", "prompt_logprobs"}.isdisjoint(said)
    assert b"prompt_tokens" not in TokenEvent.at_position(0, START_HASH, 5, "x").encode()
    assert b"logprobs" not in TokenEvent.at_position(0, START_HASH, 5, "x").encode()
    assert b"logprobs" not in Result(id="r", finish_reason="stop").encode()


def test_the_most_logprobs_fit_into_a_topic() -> None:
    top = [TokenLogprob(token=2**31 - 1, logprob=-1234.567891, text="=" * MAX_TOKEN_BYTES, bytes=[255, 254, 253])] * 20
    count = MAX_LOGPROBS // 21
    Sampling(logprobs=20, max_tokens=count)
    answer = Result(
        id="r", finish_reason="length", text="x" * 100 * count, token_ids=[2**31 - 1] * count,
        logprobs=[Logprobs(logprob=-1234.567891, text="\n" * MAX_TOKEN_BYTES, top=top)] * count,
    )  # fmt: skip
    assert len(answer.encode()) < MAX_MESSAGE_BYTES


def test_a_token_is_named_by_a_number_or_its_text_in_json() -> None:
    request = decode_message(Request, sampling(logit_bias={"302": -100, "5": 1.5}, logprobs=0))
    assert request.sampling.logit_bias == {302: -100.0, 5: 1.5}
    assert json.loads(request.encode())["sampling"]["logit_bias"] == {"302": -100.0, "5": 1.5}


# Errors on the wire.


def list_subclasses(root: type[Exception]) -> list[type[Exception]]:
    return [root, *(found for child in root.__subclasses__() for found in list_subclasses(child))]


@pytest.mark.proof
def test_every_request_error_has_a_code_of_its_own() -> None:
    kinds = list_subclasses(RequestError)
    codes = [vars(kind)["code"] for kind in kinds]
    assert len(set(codes)) == len(codes)
    assert all(re.fullmatch("[a-z]+(_[a-z]+)*", code) for code in codes)
    assert dict(zip(codes, kinds, strict=True)) == {RequestError.code: RequestError, **REQUEST_ERRORS}


@pytest.mark.parametrize("kind", REQUEST_ERRORS.values(), ids=REQUEST_ERRORS)
def test_errors_travel(kind: type[RequestError]) -> None:
    again = ErrorInfo.from_error(kind("why")).to_exception()
    assert (type(again), str(again)) == (kind, "why")


def test_an_error_of_a_later_version_is_an_internal_one() -> None:
    assert type(ErrorInfo(code="new_in_2031", message="?").to_exception()) is InternalError


def test_an_error_that_quotes_a_whole_request_still_fits() -> None:
    quoted = ErrorInfo.from_error(PromptTooLong("\x00" * MAX_REQUEST_BYTES))
    assert len(quoted.message) == MAX_ERROR_CHARS
    assert len(Result(id="r", finish_reason="error", error=quoted).encode()) < MAX_MESSAGE_BYTES


# The id of a message that cannot be read otherwise.


@pytest.mark.parametrize(
    ("value", "key", "found"),
    [
        (body(), None, "r"),
        (body(), "k", "r"),
        (body(v=2, more=[]), "k", "r"),
        (body(id="no good"), "k", "k"),
        (body(id=7), "k", "k"),
        (b"{not json", "k", "k"),
        (b"\xff\xfe", "k", "k"),
        (b"[" * 100_000, "k", "k"),
        (b"1" * 5000, "k", "k"),
        (b"[]", None, None),
        (b"", "no good", None),
        (b"", "", None),
        (body(id="r" * 129), "k" * 129, None),
    ],
)
def test_readable_id(value: bytes, key: str | None, found: str | None) -> None:
    assert extract_request_id(value, key) == found


@given(st.binary(max_size=100), st.none() | st.text(max_size=10))
def test_readable_id_never_raises(value: bytes, key: str | None) -> None:
    found = extract_request_id(value, key)
    assert found is None or is_request_id(found)


def test_of_a_list_the_first_error_is_told() -> None:
    with pytest.raises(InvalidRequest) as refused:
        decode_message(Request, b'{"v":1,"id":"a","token_ids":["a","b"]}')
    assert "token_ids.0" in str(refused.value)
    assert "token_ids.1" not in str(refused.value)
