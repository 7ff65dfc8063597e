"""A stored KV block: its key, its header, its checksums.

A block's key is a SHA-256 chain over (parent key, its token ids), rooted in the model's fingerprint and the tenant's
salt: equal keys mean the same model, the same tenant and the same tokens from the first on, in every process. The last
block of a prompt may be partial; its key covers the tokens it has.

Layout of a stored block, little endian; the content follows the header at once:

    magic 4s "PKVB" | version u16 | codec u8 | 0 u8 | num_tokens u32 | 0 u32 | payload_bytes u64 | content_bytes u64
    | key 32s | fingerprint 32s | layout 16s | tenant tag 16s | content checksum u64 (xxh3 over the content)
    | header checksum u64 (xxh3 over all of the header before it) | zeros up to 192 bytes

The payload is K and V of all layers as the pool holds them; the content is the payload as a codec wrote it.
"""

import hashlib
import hmac
import struct
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import xxhash

from penstock.errors import DamagedBlock

MAGIC = b"PKVB"
VERSION = 2
HEADER_BYTES = 192
RAW = 0
"""The codec that changes nothing."""
_FIELDS = struct.Struct("<4sHBBIIQQ32s32s16s16sQ")
_CHECKSUM = struct.Struct("<Q")
_PADDING = bytes(HEADER_BYTES - _FIELDS.size - _CHECKSUM.size)


def derive_tenant_salt(secret: str, tenant: str) -> bytes:
    """The salt that keeps a tenant's blocks apart (32 bytes): HMAC-SHA256 of the tenant, so no client can choose it."""
    return hmac.digest(secret.encode(), tenant.encode(), "sha256")


def derive_tenant_tag(salt: bytes) -> bytes:
    """What a header says of the salt (16 bytes): enough to tell tenants apart, nothing to make keys from."""
    return hashlib.sha256(b"penstock kv tenant" + salt).digest()[:16]


def hash_chain_root(fingerprint: str, salt: bytes) -> bytes:
    """The parent of a sequence's first block. `fingerprint`: 64 hex digits."""
    return hashlib.sha256(b"penstock kv 1" + bytes.fromhex(fingerprint) + salt).digest()


def hash_blocks(parent: bytes, token_ids: Sequence[int], block_size: int) -> list[bytes]:
    """The keys of the blocks that hold `token_ids` after `parent`, in order; the last may stand for a partial block."""
    packed = array("I", token_ids).tobytes()
    width = block_size * array("I").itemsize
    keys = []
    for start in range(0, len(packed), width):
        parent = hashlib.sha256(parent + packed[start : start + width]).digest()
        keys.append(parent)
    return keys


def is_always_valid() -> bool:
    """The page tag of memory that nobody else writes."""
    return True


@dataclass(frozen=True, slots=True)
class BlockKey:
    """Which block it is: all that has to agree before its bytes are used."""

    hash: bytes
    num_tokens: int
    tenant_tag: bytes
    """Of the tenant (`tenant_tag`)."""


@dataclass(frozen=True, slots=True)
class Block:
    """A block to write. `payload` may be a view of the pool, which is read while this process goes on."""

    key: BlockKey
    payload: memoryview
    """K and V of all layers, `Form.payload_bytes` bytes."""
    is_valid: Callable[[], bool] = is_always_valid
    """The page tag: whether the memory still holds this block. Asked after the checksum was taken over the content and
    before anybody can find the block; if not, nothing is stored."""


@dataclass(frozen=True, slots=True)
class ReadRequest:
    """A block to read, and where to: `Form.payload_bytes` writable bytes, of undefined content if it is not found."""

    key: BlockKey
    target: memoryview


@dataclass(frozen=True, slots=True)
class Header:
    """What a stored block says of itself."""

    key: BlockKey
    fingerprint: bytes
    layout: bytes
    codec: int
    payload_bytes: int
    content_bytes: int
    checksum: int
    """xxh3 (64 bits) of the content."""

    def pack(self) -> bytes:
        """The header's `HEADER_BYTES` bytes."""
        fields = _FIELDS.pack(
            MAGIC, VERSION, self.codec, 0, self.key.num_tokens, 0, self.payload_bytes, self.content_bytes,
            self.key.hash, self.fingerprint, self.layout, self.key.tenant_tag, self.checksum,
        )  # fmt: skip
        return b"".join((fields, _CHECKSUM.pack(xxhash.xxh3_64_intdigest(fields)), _PADDING))

    @classmethod
    def unpack(cls, stored: bytes | memoryview) -> "Header":
        """The header that `stored` begins with. Raises `DamagedBlock` if it is not one, or not whole."""
        start = bytes(stored[:HEADER_BYTES])
        if len(start) < HEADER_BYTES:
            raise DamagedBlock(f"{len(start)} bytes are no header")
        fields = start[: _FIELDS.size]
        (expected,) = _CHECKSUM.unpack_from(start, _FIELDS.size)
        if xxhash.xxh3_64_intdigest(fields) != expected or start[-len(_PADDING) :] != _PADDING:
            raise DamagedBlock("the header's checksum is wrong")
        magic, version, codec, _, num_tokens, _, payload, content, key, fingerprint, layout, tag, checksum = (
            _FIELDS.unpack(fields)
        )
        if (magic, version) != (MAGIC, VERSION):
            raise DamagedBlock(f"{magic!r}, version {version}: not a block of this version")
        return cls(BlockKey(key, num_tokens, tag), fingerprint, layout, codec, payload, content, checksum)


@dataclass(frozen=True)
class BlockFormat:
    """What all blocks of a model have in common."""

    fingerprint: bytes
    layout: bytes
    """16 bytes that stand for dtype, block size and the shapes of all layers."""
    payload_bytes: int

    def make_header(self, name: BlockKey, checksum: int, codec: int = RAW, content_bytes: int | None = None) -> Header:
        """The header of a block of this form."""
        length = self.payload_bytes if content_bytes is None else content_bytes
        return Header(name, self.fingerprint, self.layout, codec, self.payload_bytes, length, checksum)

    def is_header_of(self, header: Header, name: BlockKey) -> bool:
        """Whether a stored block is exactly the one asked for; its content is still to be checked."""
        return header == self.make_header(name, header.checksum, header.codec, header.content_bytes)
