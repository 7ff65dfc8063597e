"""What a stored block says of itself, and that nothing changed in it goes unnoticed."""

import dataclasses
import hashlib
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import DamagedBlock
from penstock.kvstore.block import HEADER_BYTES, BlockFormat, BlockKey, Header, derive_tenant_salt, derive_tenant_tag

KEY = hashlib.sha256(b"key").digest()
MODEL = hashlib.sha256(b"model").digest()
TAG = derive_tenant_tag(derive_tenant_salt("secret", "default"))
FORM = BlockFormat(MODEL, b"layout".ljust(16), 64)
NAME = BlockKey(KEY, 16, TAG)
HEADER = FORM.make_header(NAME, checksum=7)
STORED = HEADER.pack()
U64 = st.integers(0, 2**64 - 1)


@given(st.binary(min_size=32, max_size=32), st.integers(0, 2**32 - 1), U64, st.integers(0, 255), U64)
def test_what_is_packed_is_unpacked(key: bytes, num_tokens: int, checksum: int, codec: int, length: int) -> None:
    header = FORM.make_header(BlockKey(key, num_tokens, TAG), checksum, codec, length)
    stored = header.pack()
    assert len(stored) == HEADER_BYTES
    assert Header.unpack(stored) == Header.unpack(memoryview(stored + b"content")) == header


def test_the_layout_is_stable() -> None:
    """Blocks written by other processes, and by earlier versions, are read."""
    assert HEADER_BYTES == 192
    assert STORED[:16] == b"PKVB" + b"\x02\0" + b"\0\0" + b"\x10\0\0\0" + b"\0\0\0\0"
    assert STORED[16:32] == b"\x40\0\0\0\0\0\0\0" * 2
    assert STORED[32:136] == KEY + MODEL + b"layout".ljust(16) + TAG + b"\x07\0\0\0\0\0\0\0"
    assert hashlib.sha256(STORED).hexdigest()[:16] == "01153b335c348d28"


def test_no_flipped_bit_goes_unnoticed_nor_another_version_nor_a_header_cut_short() -> None:
    damaged = [STORED[:length] for length in (0, 1, 143, HEADER_BYTES - 1)]
    for place, bit in itertools.product(range(144), range(8)):  # one of them makes version 2 version 3
        damaged.append(STORED[:place] + bytes([STORED[place] ^ 1 << bit]) + STORED[place + 1 :])
    for header in damaged:
        with pytest.raises(DamagedBlock):
            Header.unpack(header)


@pytest.mark.parametrize(
    "change",
    [
        {"key": BlockKey(MODEL, 16, TAG)},
        {"key": BlockKey(KEY, 15, TAG)},
        {"key": BlockKey(KEY, 16, derive_tenant_tag(derive_tenant_salt("secret", "other")))},
        {"fingerprint": KEY},
        {"layout": bytes(16)},
        {"payload_bytes": 65},
    ],
    ids=["key", "tokens", "tenant", "model", "layout", "length"],
)
def test_a_block_is_only_itself(change: dict[str, object]) -> None:
    assert FORM.is_header_of(HEADER, NAME)
    assert not FORM.is_header_of(dataclasses.replace(HEADER, **change), NAME)  # type: ignore[arg-type]


def test_codec_and_length_of_the_content_are_the_writers_choice() -> None:
    assert FORM.is_header_of(FORM.make_header(NAME, 1, codec=1, content_bytes=10), NAME)


def test_a_tag_does_not_give_the_salt_away() -> None:
    salt = derive_tenant_salt("secret", "default")
    assert len(TAG) == 16
    assert TAG not in salt
    assert salt[:16] not in TAG
