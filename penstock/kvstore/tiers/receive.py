"""Reading one stored block from a connection to where it is wanted, and checking it on the way."""

from collections.abc import Generator
from enum import Enum
from typing import TYPE_CHECKING, TypeVar

import xxhash

from penstock.errors import DamagedBlock
from penstock.kvstore.block import HEADER_BYTES, RAW, BlockFormat, Header, ReadRequest
from penstock.kvstore.tiers.wire import Refused, Wire

if TYPE_CHECKING:
    from penstock.kvstore.codec import Codecs

T = TypeVar("T")
Receiving = Generator[None, None, T]
"""Work with pauses, in which something else can be received."""


class Found(Enum):
    """What a server had under a block's key."""

    WHOLE = "whole"
    NOTHING = "nothing"
    DAMAGED = "damaged"


def receive(wire: Wire, form: BlockFormat, want: ReadRequest, codecs: "Codecs | None") -> Receiving[tuple[Found, int]]:
    """Read the reply to a GET, to its end, in pieces; what it was, and how many bytes."""
    try:
        length = wire.length()
    except Refused as refused:
        if str(refused).startswith("WRONGTYPE"):
            return Found.DAMAGED, 0
        raise
    if length is None:
        return Found.NOTHING, 0
    if length < HEADER_BYTES:
        wire.skip(length)
        wire.end_value()
        return Found.DAMAGED, length
    start = bytearray(HEADER_BYTES)
    wire.read_into(memoryview(start))
    whole = yield from _content(wire, form, want, memoryview(start), length - HEADER_BYTES, codecs)
    wire.end_value()
    return Found.WHOLE if whole else Found.DAMAGED, length


def _content(
    wire: Wire, form: BlockFormat, want: ReadRequest, start: memoryview, length: int, codecs: "Codecs | None"
) -> Receiving[bool]:
    """Read the `length` bytes after the header; whether they are the content of the block that is wanted."""
    try:
        header = Header.unpack(start)
    except DamagedBlock:
        header = None
    if header is None or not form.is_header_of(header, want.key) or header.content_bytes != length:
        wire.skip(length)
        return False
    if header.codec == RAW and length == len(want.target):
        return (yield from _checked(wire, want.target, header))
    if codecs is None or not codecs.knows(header.codec) or length > 2 * form.payload_bytes:
        wire.skip(length)
        return False
    content = memoryview(bytearray(length))
    return (yield from _checked(wire, content, header)) and codecs.decode_into(header.codec, content, want.target)


def _checked(wire: Wire, into: memoryview, header: Header) -> Receiving[bool]:
    digest = xxhash.xxh3_64()
    yield from wire.pieces(into, digest)
    return digest.intdigest() == header.checksum
