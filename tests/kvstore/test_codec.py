"""Codecs: the lossless one gives every bit back, trusts nothing that it reads, and is used where that is faster."""

import random
from collections.abc import Callable
from typing import get_args

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from penstock.kvstore.block import RAW
from penstock.kvstore.codec import LOSSLESS, Codec, Element, make_codecs
from penstock.kvstore.codec.choice import MIN_SAMPLE_BYTES, NUM_FIRST_PROBES, PROBE_INTERVAL_BLOCKS, AdaptiveCodec
from penstock.kvstore.codec.lossless import LosslessCodec
from tests.draws import mark_some

ELEMENTS: tuple[Element, ...] = get_args(Element)


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


# Bad data.


def codecs() -> list[tuple[Codec, bytes]]:
    """Codecs, and payloads that they do not store raw."""
    floats = np.random.default_rng(2).normal(0, 1, 2432).astype(np.float32).tobytes()
    return [(LosslessCodec("float32"), floats), (LosslessCodec("bfloat16"), floats)]


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


def test_what_a_tier_reads() -> None:
    found, payload, into = make_codecs("float32"), bytes(3200), memoryview(bytearray(b"\1" * 3200))
    number, content = LosslessCodec("float32").encode_payload(memoryview(payload))
    assert [other for other in range(256) if found.has_decoder(other)] == [number]
    assert found.decode_payload(number, content, into)
    assert into == payload
    assert not found.decode_payload(77, content, into)


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
    found, noise = make_codecs("float32"), random.Random(1).randbytes(3200)
    found.record_transfer(10**6, 100.0)
    assert all(found.encode_payload(memoryview(noise))[0] == RAW for _ in range(20))


def test_raw_needs_no_copy() -> None:
    payload = memoryview(bytearray(3200))
    assert make_codecs("float32").encode_payload(payload)[1] is payload
