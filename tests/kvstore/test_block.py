"""A stored block is used only if it is whole and exactly the one asked for."""

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.block import HEADER_BYTES, num_block_tokens, pack, unpack

KEY = hashlib.sha256(b"key").digest()
MODEL = hashlib.sha256(b"model").digest()
PAYLOAD = bytes(range(64))
STORED = pack(KEY, MODEL, 16, PAYLOAD)
DIGESTS = st.binary(min_size=32, max_size=32)


def read(stored: bytes | memoryview) -> memoryview | None:
    return unpack(stored, KEY, MODEL, 16, len(PAYLOAD))


@given(DIGESTS, DIGESTS, st.integers(0, 2**32 - 1), st.binary(max_size=300))
def test_what_is_packed_is_unpacked(key: bytes, model: bytes, num_tokens: int, payload: bytes) -> None:
    stored = pack(key, model, num_tokens, payload)
    assert len(stored) == HEADER_BYTES + len(payload)
    for form in (stored, memoryview(stored)):
        view = unpack(form, key, model, num_tokens, len(payload))
        assert view is not None
        assert bytes(view) == payload
    assert pack(key, model, num_tokens, memoryview(payload)) == stored


def test_the_layout_is_stable() -> None:
    """Blocks written by other processes, and by earlier versions, are read."""
    assert HEADER_BYTES == 92
    assert STORED[:20] == b"PKVB" + b"\x01\0" + b"\0\0" + b"\x10\0\0\0" + b"\x40\0\0\0\0\0\0\0"
    assert STORED[20:84] == KEY + MODEL
    assert hashlib.sha256(STORED).hexdigest()[:16] == "c19f6d465a7a42e1"


@pytest.mark.parametrize("place", range(len(STORED)))
def test_no_flipped_bit_goes_unnoticed(place: int) -> None:
    for bit in range(8):
        damaged = bytearray(STORED)
        damaged[place] ^= 1 << bit
        assert read(bytes(damaged)) is None


@given(st.integers(0, len(STORED) - 1), st.integers(0, 255))
def test_no_changed_byte_goes_unnoticed(place: int, value: int) -> None:
    changed = STORED[:place] + bytes([value]) + STORED[place + 1 :]
    assert (read(changed) is None) == (changed != STORED)


@pytest.mark.parametrize("length", range(len(STORED)))
def test_no_truncation_goes_unnoticed(length: int) -> None:
    assert read(STORED[:length]) is None
    assert read(STORED[-length:] if length else b"") is None


@given(st.binary(min_size=1, max_size=200))
def test_no_extension_goes_unnoticed(more: bytes) -> None:
    assert read(STORED + more) is None
    assert read(more + STORED) is None


@given(st.binary(max_size=2 * len(STORED)))
def test_noise_is_no_block(noise: bytes) -> None:
    assert read(noise) is None


@given(DIGESTS, DIGESTS, st.integers(0, 2**32 - 1), st.integers(0, 2**40))
def test_another_block_is_not_this_one(key: bytes, model: bytes, num_tokens: int, payload_len: int) -> None:
    for asked in (
        (key, MODEL, 16, len(PAYLOAD)),
        (KEY, model, 16, len(PAYLOAD)),
        (KEY, MODEL, num_tokens, len(PAYLOAD)),
        (KEY, MODEL, 16, payload_len),
    ):
        assert (unpack(STORED, *asked) is None) == (asked != (KEY, MODEL, 16, len(PAYLOAD)))


def test_a_foreign_block_with_a_good_checksum_is_not_used() -> None:
    other = hashlib.sha256(b"other").digest()
    for foreign in (pack(other, MODEL, 16, PAYLOAD), pack(KEY, other, 16, PAYLOAD), pack(KEY, MODEL, 15, PAYLOAD)):
        assert read(foreign) is None


@given(st.integers(0, 500), st.integers(1, 40))
def test_the_blocks_of_a_sequence_hold_all_its_tokens(num_tokens: int, block_size: int) -> None:
    num_blocks = -(-num_tokens // block_size)
    counts = [num_block_tokens(index, num_tokens, block_size) for index in range(num_blocks + 2)]
    assert sum(counts) == num_tokens
    assert all(count == block_size for count in counts[: num_tokens // block_size])
    assert counts[num_blocks:] == [0, 0]
