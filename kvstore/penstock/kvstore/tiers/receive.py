"""Receive one stored block from a connection into its target, and check it on the way."""

from collections.abc import Generator
from typing import TYPE_CHECKING, TypeVar

import xxhash

from penstock.errors import DamagedBlock
from penstock.kvstore.block import HEADER_BYTES, RAW, BlockFormat, Header, ReadOutcome, ReadRequest
from penstock.kvstore.tiers.wire import ErrorReply, RespConnection

if TYPE_CHECKING:
    from penstock.kvstore.codec import TierCodecs

T = TypeVar("T")
Receiving = Generator[None, None, T]
"""A computation that pauses, so that other blocks can be received meanwhile."""


def receive_block(
    wire: RespConnection, form: BlockFormat, request: ReadRequest, codecs: "TierCodecs | None"
) -> Receiving[tuple[ReadOutcome, int]]:
    """Read the reply to a GET in chunks. Return what was found, and its bytes."""
    try:
        length = wire.read_length()
    except ErrorReply as refused:
        if str(refused).startswith("WRONGTYPE"):
            return ReadOutcome.DAMAGED, 0
        raise
    if length is None:
        return ReadOutcome.MISSING, 0
    if length < HEADER_BYTES:
        wire.skip_bytes(length)
        wire.read_value_end()
        return ReadOutcome.DAMAGED, length
    start = bytearray(HEADER_BYTES)
    wire.read_into(memoryview(start))
    whole = yield from _receive_content(wire, form, request, memoryview(start), length - HEADER_BYTES, codecs)
    wire.read_value_end()
    return ReadOutcome.WHOLE if whole else ReadOutcome.DAMAGED, length


def _receive_content(
    wire: RespConnection,
    form: BlockFormat,
    request: ReadRequest,
    start: memoryview,
    length: int,
    codecs: "TierCodecs | None",
) -> Receiving[bool]:
    """Read the `length` bytes after the header. Return whether they are the content of the block asked for."""
    try:
        header = Header.unpack(start)
    except DamagedBlock:
        header = None
    if header is None or not form.is_header_of(header, request.key) or header.content_bytes != length:
        wire.skip_bytes(length)
        return False
    if header.codec == RAW and length == len(request.target):
        return (yield from _receive_checked(wire, request.target, header))
    if codecs is None or not codecs.has_decoder(header.codec) or length > 2 * form.payload_bytes:
        wire.skip_bytes(length)
        return False
    content = memoryview(bytearray(length))
    return (yield from _receive_checked(wire, content, header)) and codecs.decode_payload(
        header.codec, content, request.target
    )


def _receive_checked(wire: RespConnection, into: memoryview, header: Header) -> Receiving[bool]:
    digest = xxhash.xxh3_64()
    yield from wire.read_chunks(into, digest)
    return digest.intdigest() == header.checksum
