"""Codecs: the lossless one gives every bit back, the one of 8 bits is near enough, and neither trusts what it reads."""

import random
from collections.abc import Callable
from typing import Literal, get_args

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from penstock.kvstore.block import RAW
from penstock.kvstore.codec import INT8, LOSSLESS, Codec, Element, PayloadShape, TierCodecs, make_codecs
from penstock.kvstore.codec.choice import MIN_SAMPLE_BYTES, NUM_FIRST_PROBES, PROBE_INTERVAL_BLOCKS, AdaptiveCodec
from penstock.kvstore.codec.contract import ELEMENT_BYTES
from penstock.kvstore.codec.int8 import Int8Codec, to_float32
from penstock.kvstore.codec.lossless import LosslessCodec
from tests.draws import mark_some

ELEMENTS: tuple[Element, ...] = get_args(Element)
FLOATS = tuple(element for element in ELEMENTS if element != "int8")
ROWS = ((3, 8), (2, 5), (4, 1))
NUM_VALUES = sum(count * size for count, size in ROWS)


def decoded(codec: Codec, content: memoryview | bytes | bytearray, length: int) -> bytes | None:
    """What the codec makes of the content. Nothing around the place for it may change."""
    memory = bytearray(b"\x5a" * (length + 16))
    whole = codec.decode_payload(memoryview(content), memoryview(memory)[8:-8])
    assert memory[:8] == memory[-8:] == b"\x5a" * 8
    return bytes(memory[8:-8]) if whole else None


def numbers(element: Element, values: np.ndarray) -> bytes:
    """Floats as an element has them, cut off and not rounded where it is bfloat16."""
    if element == "bfloat16":
        return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16).tobytes()
    return values.astype(element).tobytes()


# Without loss.


@pytest.mark.proof
@given(st.sampled_from(ELEMENTS), st.binary(max_size=4000), st.integers(1, 40))
@example("float32", b"\x7f\xc0\x00\x01" * 8, 1)
@example("bfloat16", b"", 1)
def test_lossless_gives_every_bit_back(element: Element, some: bytes, times: int) -> None:
    """All byte patterns: NaNs of every kind, infinities, denormals, lengths that are no whole number of elements."""
    codec, payload = LosslessCodec(element), some * times
    number, content = codec.encode_payload(memoryview(payload))
    if number == RAW:
        assert content == payload
    else:
        assert number == LOSSLESS
        assert len(content) < len(payload)
        assert decoded(codec, content, len(payload)) == payload


@pytest.mark.parametrize("element", ELEMENTS)
def test_lossless_of_every_16_bit_pattern(element: Element) -> None:
    payload = np.arange(2**16, dtype=np.uint16).tobytes() * 2
    number, content = LosslessCodec(element).encode_payload(memoryview(payload))
    assert number == LOSSLESS
    assert decoded(LosslessCodec(element), content, len(payload)) == payload


@pytest.mark.parametrize(("element", "most"), [("float32", 0.9), ("bfloat16", 0.8)])
def test_lossless_makes_numbers_like_those_of_a_model_shorter(element: Element, most: float) -> None:
    values = np.random.default_rng(1).normal(0, 1, 50_000)
    payload = numbers(element, values)
    _, content = LosslessCodec(element).encode_payload(memoryview(payload))
    assert len(content) < most * len(payload)


# 8 bits.


@given(st.sampled_from(FLOATS), st.binary(min_size=NUM_VALUES * 4, max_size=NUM_VALUES * 4))
def test_int8_is_within_half_a_step_of_each_row(element: Element, some: bytes) -> None:
    """Any bits: a block with an infinity or a NaN is stored raw."""
    codec = Int8Codec(PayloadShape(element, ROWS))
    payload = some[: NUM_VALUES * ELEMENT_BYTES[element]]
    values = to_float32(memoryview(payload), element)
    number, content = codec.encode_payload(memoryview(payload))
    if not np.isfinite(values).all():
        assert number == RAW
        assert content == payload
        return
    assert number == INT8
    assert len(content) == NUM_VALUES + 4 * sum(count for count, _ in ROWS)
    got = decoded(codec, content, len(payload))
    assert got is not None
    found, start = to_float32(memoryview(got), element).astype(np.float64), 0
    assert np.isfinite(found).all()
    # The element's own rounding comes on top of half a step, and what is below the smallest scale is lost.
    rounding = {"float32": 2**-22, "bfloat16": 2**-8, "float16": 2**-10}[element]
    for count, size in ROWS:
        part = slice(start, start + count * size)
        right = values[part].astype(np.float64).reshape(count, size)
        largest = np.abs(right).max(axis=1, keepdims=True)
        allowed = largest * (0.5 / 127 + rounding) * 1.01 + 127 * 2.0**-149 + (element == "float16") * 2.0**-24
        assert (np.abs(found[part].reshape(count, size) - right) <= allowed).all()
        start += count * size


@pytest.mark.parametrize("element", FLOATS)
def test_int8_of_zeros_tiny_and_huge_numbers(element: Element) -> None:
    largest = {"float32": float(np.finfo(np.float32).max), "bfloat16": 3.3895314e38, "float16": 65504.0}[element]
    shape = PayloadShape(element, ((4, 4),))
    tiny = 2.0**-24 if element == "float16" else 2.0**-133
    values = np.array([[0, 0, 0, 0], [tiny, -tiny, 0, 0], [largest, -largest, 0, 0], [1, -1, 0.5, 127]])
    payload = numbers(element, values)
    number, content = Int8Codec(shape).encode_payload(memoryview(payload))
    got = decoded(Int8Codec(shape), content, len(payload))
    assert number == INT8
    assert got is not None
    found = to_float32(memoryview(got), element).reshape(4, 4)
    assert (found[0] == 0).all()
    assert (np.abs(found[1]) <= 2 * tiny).all()
    np.testing.assert_allclose(found[2], [largest, -largest, 0, 0], rtol=2**-8)
    assert found[3, 3] == 127


@pytest.mark.parametrize("length", [0, 3, 8, 4 * NUM_VALUES + 1])
def test_int8_of_another_length_is_raw(length: int) -> None:
    """Also where that is no whole number of elements."""
    codec, payload = Int8Codec(PayloadShape("float32", ROWS)), memoryview(bytes(length))
    assert codec.encode_payload(payload) == (RAW, payload)


# Bad data.


def codecs() -> list[tuple[Codec, bytes]]:
    """Codecs, and payloads that they do not store raw."""
    floats = np.random.default_rng(2).normal(0, 1, NUM_VALUES * 64).astype(np.float32).tobytes()
    shape = PayloadShape("float32", tuple((64 * count, size) for count, size in ROWS))
    return [(LosslessCodec("float32"), floats), (LosslessCodec("bfloat16"), floats), (Int8Codec(shape), floats)]


@pytest.mark.parametrize(("codec", "payload"), codecs())
def test_damaged_content_never_raises(codec: Codec, payload: bytes) -> None:
    """What was changed is refused, or gives other bytes; what is not whole is refused. The checksum comes before."""
    _, content = codec.encode_payload(memoryview(payload))
    rng = random.Random(4)
    for _ in range(300):
        changed = bytearray(content)
        for _ in range(rng.randrange(1, 4)):
            changed[rng.randrange(len(changed) if rng.random() < 0.5 else 40)] = rng.randrange(256)
        decoded(codec, changed, len(payload))
        assert decoded(codec, content[: rng.randrange(len(content))], len(payload)) is None
        assert decoded(codec, bytes(content) + bytes(rng.randrange(1, 9)), len(payload)) is None
    for length in (0, 1, len(payload) - 4, len(payload) + 4):
        assert decoded(codec, content, length) is None


@given(st.binary(max_size=300), st.integers(0, 400))
def test_anything_may_be_decoded(some: bytes, length: int) -> None:
    for codec, _ in codecs():
        decoded(codec, some, length)


def test_a_frame_that_says_it_is_large_is_refused() -> None:
    """A plane is as long as the payload says: a small file cannot ask for all the memory there is."""
    codec, small = LosslessCodec("bfloat16"), bytes(2000)
    _, content = codec.encode_payload(memoryview(bytes(2**24)))
    assert decoded(codec, content, len(small)) is None


# What a tier has.


@pytest.mark.parametrize(
    ("choice", "number", "known"),
    [("raw", RAW, {LOSSLESS}), ("lossless", LOSSLESS, {LOSSLESS}), ("int8", INT8, {1, 2})],
)
def test_what_a_setting_writes_and_reads(
    choice: Literal["raw", "lossless", "int8"], number: int, known: set[int]
) -> None:
    """8-bit blocks are read only where they are written."""
    found = make_codecs(choice, PayloadShape("float32", ((100, 8),)))
    payload = bytes(3200)
    written, content = found.encode_payload(memoryview(payload))
    assert written == number
    assert {other for other in range(256) if found.has_decoder(other)} == known
    into = bytearray(b"\1" * 3200)
    if number != RAW:
        assert found.decode_payload(number, content, memoryview(into))
        assert into == payload
    assert not found.decode_payload(77, content, memoryview(into))


class Slow:
    """A codec that halves, in no time or in a lot of it, as seen by the clock of a test."""

    name = "slow"

    def __init__(self, clock: list[float], seconds: float) -> None:
        self.clock, self.seconds = clock, seconds

    def encode_payload(self, payload: memoryview) -> tuple[int, memoryview]:
        self.clock[0] += self.seconds
        return LOSSLESS, payload[: len(payload) // 2]

    def decode_payload(self, content: memoryview, into: memoryview) -> bool:
        self.clock[0] += self.seconds
        return True


PAYLOAD = memoryview(bytes(10**6))


@pytest.fixture
def choosing(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], AdaptiveCodec]:
    """Makes a choice whose codec takes so many seconds for a megabyte, each way."""
    clock = [0.0]
    monkeypatch.setattr("penstock.kvstore.codec.choice.time.perf_counter", lambda: clock[0])
    return lambda seconds: AdaptiveCodec(Slow(clock, seconds))


def test_auto_is_raw_until_the_link_was_seen(choosing: Callable[[float], AdaptiveCodec]) -> None:
    choice = choosing(0.001)
    assert [choice.encode_payload(PAYLOAD)[0] for _ in range(10)] == [RAW] * 10
    choice.record_transfer(MIN_SAMPLE_BYTES - 1, 10.0)  # too little to say anything
    assert choice.encode_payload(PAYLOAD)[0] == RAW
    choice.record_transfer(10**6, 0.1)
    assert choice.encode_payload(PAYLOAD)[0] == LOSSLESS


@pytest.mark.parametrize(("link_seconds", "pays"), mark_some([(0.0011, True), (0.0009, False)], pytest.mark.proof))
def test_auto_compresses_where_that_is_faster(
    choosing: Callable[[float], AdaptiveCodec], link_seconds: float, pays: bool
) -> None:
    """Half a megabyte less, there and back, against half a millisecond to encode and half to decode."""
    choice = choosing(0.0005)
    for _ in range(NUM_FIRST_PROBES):
        choice.encode_payload(PAYLOAD)
    choice.record_transfer(10**6, link_seconds)
    assert choice.encode_payload(PAYLOAD)[0] == (LOSSLESS if pays else RAW)


def test_auto_follows_a_link_and_a_codec_that_change(choosing: Callable[[float], AdaptiveCodec]) -> None:
    choice = choosing(0.0005)
    choice.encode_payload(PAYLOAD)
    choice.record_transfer(10**6, 0.1)
    assert choice.encode_payload(PAYLOAD)[0] == LOSSLESS
    for _ in range(100):
        choice.record_transfer(10**6, 0.0001)
    assert [choice.encode_payload(PAYLOAD)[0] for _ in range(3)] == [RAW] * 3
    for _ in range(100):
        choice.record_transfer(10**6, 0.1)
    assert choice.encode_payload(PAYLOAD)[0] == LOSSLESS
    codec = choice._codec
    assert isinstance(codec, Slow)
    codec.seconds = 10.0
    for _ in range(2 * PROBE_INTERVAL_BLOCKS):
        choice.encode_payload(PAYLOAD)
    assert choice.encode_payload(PAYLOAD)[0] == RAW, "the probe every so often has not seen it"


def test_auto_with_what_does_not_compress_stays_raw() -> None:
    shape = PayloadShape("float32", ((100, 8),))
    found, noise = make_codecs("auto", shape), random.Random(1).randbytes(3200)
    found.record_transfer(10**6, 100.0)
    assert all(found.encode_payload(memoryview(noise))[0] == RAW for _ in range(20))


def test_raw_needs_no_copy() -> None:
    payload = memoryview(bytearray(3200))
    assert make_codecs("raw", PayloadShape("float32", ((100, 8),))).encode_payload(payload)[1] is payload
    assert isinstance(make_codecs("auto", PayloadShape("float32", ((100, 8),))), TierCodecs)
