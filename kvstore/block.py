"""A stored KV block: its key, its header, its checksum.

A block's key is a SHA-256 chain over (parent key, its token ids), rooted in the model's fingerprint and the tenant's
salt: equal keys mean the same model, the same tenant and the same tokens from the first on, in every process. The last
block of a prompt may be partial; its key covers the tokens it has.

Layout of a stored block, little endian:

    magic 4s "PKVB" | version u16 | reserved u16 | num_tokens u32 | payload_len u64 | key 32s | fingerprint 32s
    | checksum u64 (xxh3 over all of the header before it, then the payload) | payload (K and V of all layers)
"""

import hashlib
import hmac
import struct
from array import array
from collections.abc import Sequence

import xxhash

MAGIC = b"PKVB"
VERSION = 1
_FIELDS = struct.Struct("<4sHHIQ32s32s")
_CHECKSUM = struct.Struct("<Q")
HEADER_BYTES = _FIELDS.size + _CHECKSUM.size


def tenant_salt(secret: str, tenant: str) -> bytes:
    """The salt that keeps a tenant's blocks apart (32 bytes): HMAC-SHA256 of the tenant, so no client can choose it."""
    return hmac.digest(secret.encode(), tenant.encode(), "sha256")


def chain_root(fingerprint: str, salt: bytes) -> bytes:
    """The parent of a sequence's first block. `fingerprint`: 64 hex digits."""
    return hashlib.sha256(b"penstock kv 1" + bytes.fromhex(fingerprint) + salt).digest()


def chain_keys(root: bytes, token_ids: Sequence[int], block_size: int) -> list[bytes]:
    """The keys of the blocks that hold `token_ids`, in order; the last one may stand for a partial block."""
    packed = array("I", token_ids).tobytes()
    width = block_size * array("I").itemsize
    keys, parent = [], root
    for start in range(0, len(packed), width):
        parent = hashlib.sha256(parent + packed[start : start + width]).digest()
        keys.append(parent)
    return keys


def num_block_tokens(index: int, num_tokens: int, block_size: int) -> int:
    """How many of a sequence's first `num_tokens` tokens block `index` holds."""
    return max(0, min(block_size, num_tokens - index * block_size))


def checksum(header: bytes, payload: bytes | memoryview) -> int:
    """xxh3 (64 bits) over the header's fields and the payload."""
    digest = xxhash.xxh3_64(header)
    digest.update(payload)
    return digest.intdigest()


def pack(key: bytes, fingerprint: bytes, num_tokens: int, payload: bytes | memoryview) -> bytes:
    """The bytes of a stored block."""
    fields = _FIELDS.pack(MAGIC, VERSION, 0, num_tokens, len(payload), key, fingerprint)
    return b"".join((fields, _CHECKSUM.pack(checksum(fields, payload)), payload))


def unpack(
    stored: bytes | memoryview, key: bytes, fingerprint: bytes, num_tokens: int, payload_len: int
) -> memoryview | None:
    """The payload, if the block is whole and is exactly the one asked for; otherwise None."""
    view = memoryview(stored)
    if len(view) != HEADER_BYTES + payload_len:
        return None
    fields, payload = bytes(view[: _FIELDS.size]), view[HEADER_BYTES:]
    if fields != _FIELDS.pack(MAGIC, VERSION, 0, num_tokens, payload_len, key, fingerprint):
        return None
    (expected,) = _CHECKSUM.unpack(view[_FIELDS.size : HEADER_BYTES])
    return payload if checksum(fields, payload) == expected else None
