"""A stored KV block: its key, its header, its checksums.

A block's hash is SHA-256 over its parent's hash and its token ids. The chain begins with the model's fingerprint and
the tenant's salt, and where an adapter of the model computes with that one's digest: equal hashes mean the same model,
adapter and tenant, and the same tokens from the first on, in every process. The last block of a prompt may be partial;
its hash covers the tokens it has. Where tokens stand for a picture (`Span`), the hash also covers which one, and which
of its rows they are.

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
from enum import Enum
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import xxhash

from penstock.errors import DamagedBlock

MAGIC = b"PKVB"
VERSION = 2
HEADER_BYTES = 192
RAW = 0
"""Codec number of a content that is the payload itself."""
_FIELDS = struct.Struct("<4sHBBIIQQ32s32s16s16sQ")
_CHECKSUM = struct.Struct("<Q")
_PLACE = struct.Struct("<QQQ")
_PADDING = bytes(HEADER_BYTES - _FIELDS.size - _CHECKSUM.size)


def derive_tenant_salt(secret: str, tenant: str) -> bytes:
    """Return the salt that keeps a tenant's blocks apart (32 bytes).

    It is an HMAC-SHA256 of the tenant's name, so no client can choose it.
    """
    return hmac.digest(secret.encode(), tenant.encode(), "sha256")


def derive_tenant_tag(salt: bytes) -> bytes:
    """Return the tag that headers carry (16 bytes). It tells tenants apart, and no hash can be made from it."""
    return hashlib.sha256(b"penstock kv tenant" + salt).digest()[:16]


def hash_chain_root(fingerprint: str, salt: bytes) -> bytes:
    """Return the parent hash of a sequence's first block. `fingerprint` has 64 hex digits."""
    return hashlib.sha256(b"penstock kv 1" + bytes.fromhex(fingerprint) + salt).digest()


@lru_cache(maxsize=1024)
def derive_tenant_root(secret: str, fingerprint: str, tenant: str, adapter: str = "") -> tuple[bytes, bytes]:
    """Return the parent hash of a tenant's first blocks, and the tag that their headers carry.

    `adapter` is the digest of the adapter that computes them, 64 hex digits; empty for the model alone.
    """
    salt = derive_tenant_salt(secret, tenant)
    root = hash_chain_root(fingerprint, salt)
    if adapter:
        root = hashlib.sha256(b"adapter" + bytes.fromhex(adapter) + root).digest()
    return root, derive_tenant_tag(salt)


def hash_blocks(parent: bytes, token_ids: Sequence[int], block_size: int) -> list[bytes]:
    """Return the hashes of the blocks that hold `token_ids` after the block `parent`; the last block may be partial."""
    packed = array("I", token_ids).tobytes()
    width = block_size * array("I").itemsize
    hashes = []
    for start in range(0, len(packed), width):
        parent = hashlib.sha256(parent + packed[start : start + width]).digest()
        hashes.append(parent)
    return hashes


def derive_state_hash(block_hash: bytes, part: int = 0) -> bytes:
    """Return the hash under which a part of the state after a block is stored.

    The state is the recurrent state of all layers without KV after the block's last token.
    """
    return hashlib.sha256(b"penstock state 1" + part.to_bytes(4, "little") + block_hash).digest()


def find_last_scan_chunk(num_prompt_tokens: int, scan_chunk_tokens: int) -> int:
    """Return where the last scan chunk of a prompt begins: the last multiple of `scan_chunk_tokens` before its last
    token.
    """
    return (num_prompt_tokens - 1) // scan_chunk_tokens * scan_chunk_tokens


def is_always_valid() -> bool:
    """Return True: the page tag of memory that only its owner writes."""
    return True


@dataclass(frozen=True, slots=True)
class BlockKey:
    """Identity of a block: all of it has to agree before the block's bytes are used."""

    hash: bytes
    num_tokens: int
    """Tokens whose KV it is; 0 for a part of a state."""
    tenant_tag: bytes
    """See `derive_tenant_tag`."""


@dataclass(frozen=True, slots=True)
class Block:
    """A block to write. `payload` may be a view of the pool, which other threads go on using."""

    key: BlockKey
    payload: memoryview
    """K and V of all layers, `BlockFormat.payload_bytes` bytes."""
    is_valid: Callable[[], bool] = is_always_valid
    """The page tag: returns whether the memory still holds this block. It is called after the checksum was computed and
    before the block can be found; if it is False, nothing is stored."""


@dataclass(frozen=True, slots=True)
class ReadRequest:
    """A block to read, and where to: `target` has `BlockFormat.payload_bytes` writable bytes.

    Their content is undefined if the block is not found.
    """

    key: BlockKey
    target: memoryview


class ReadOutcome(Enum):
    """The outcome of reading a KV block from a tier."""

    WHOLE = "whole"
    MISSING = "missing"
    DAMAGED = "damaged"


@dataclass(frozen=True, slots=True)
class Header:
    """The header of a stored block."""

    key: BlockKey
    fingerprint: bytes
    layout: bytes
    codec: int
    payload_bytes: int
    content_bytes: int
    checksum: int
    """xxh3 (64 bits) of the content."""

    def pack(self) -> bytes:
        """Return the header as `HEADER_BYTES` bytes."""
        fields = _FIELDS.pack(
            MAGIC, VERSION, self.codec, 0, self.key.num_tokens, 0, self.payload_bytes, self.content_bytes,
            self.key.hash, self.fingerprint, self.layout, self.key.tenant_tag, self.checksum,
        )  # fmt: skip
        return b"".join((fields, _CHECKSUM.pack(xxhash.xxh3_64_intdigest(fields)), _PADDING))

    @classmethod
    def unpack(cls, stored: bytes | memoryview) -> "Header":
        """Return the header at the start of `stored`. Raise `DamagedBlock` if it is none, or damaged."""
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
    """Format of all stored blocks of a model."""

    fingerprint: bytes
    layout: bytes
    """Hash over dtype, block size and the shapes of all layers (16 bytes)."""
    payload_bytes: int

    def make_header(self, name: BlockKey, checksum: int, codec: int = RAW, content_bytes: int | None = None) -> Header:
        """Return the header of a block of this format."""
        length = self.payload_bytes if content_bytes is None else content_bytes
        return Header(name, self.fingerprint, self.layout, codec, self.payload_bytes, length, checksum)

    def is_header_of(self, header: Header, name: BlockKey) -> bool:
        """Return whether a stored block is exactly the one asked for. Its content is still to be checked."""
        return header == self.make_header(name, header.checksum, header.codec, header.content_bytes)


class Span(NamedTuple):
    """Tokens of a prompt, one behind the other, that stand for rows of a picture: their ids do not say which."""

    first: int
    """Index of the first of them among the prompt's tokens."""
    num_tokens: int
    name: bytes
    """Digest of all that the picture's rows follow from (32 bytes)."""
    row: int = 0
    """Which row of the picture the first token stands for."""

    @property
    def end(self) -> int:
        """The index behind the last of them."""
        return self.first + self.num_tokens


class BlockHasher:
    """Computes the keys of one sequence's blocks as the sequence grows: `block_size` tokens each, after `root`.

    With `scan_chunk_tokens`, the KV of a token depends on how the tokens before it were divided among the model's
    calls. The model reads full scan chunks of that many tokens first, then the rest of the prompt, then one token at a
    time. The hashes of blocks after the last full scan chunk therefore also cover the length of the prompt.

    A block that has tokens of `spans` also covers the picture's name, which row of it the block has first, and where.
    """

    def __init__(
        self,
        root: bytes,
        tenant_tag: bytes,
        block_size: int,
        scan_chunk_tokens: int = 0,
        num_prompt_tokens: int = 0,
        spans: Sequence[Span] = (),
    ) -> None:
        self.keys: list[BlockKey] = []
        """Keys of the full blocks so far, in order."""
        self.block_size = block_size
        self._root, self._tenant_tag = root, tenant_tag
        self._spans: dict[int, list[Span]] = {}
        """By the index of a block: what it has of each span."""
        for span in spans:
            for index in range(span.first // block_size, -(-span.end // block_size)):
                first, end = max(span.first, index * block_size), min(span.end, (index + 1) * block_size)
                part = Span(first, end - first, span.name, span.row + first - span.first)
                self._spans.setdefault(index, []).append(part)
        self._first_answer_block = -1
        self.num_prompt_tokens = num_prompt_tokens
        self._last_scan_chunk_block = (
            find_last_scan_chunk(num_prompt_tokens, scan_chunk_tokens) // block_size if scan_chunk_tokens else -1
        )

    def hash_full_blocks(self, token_ids: Sequence[int]) -> list[BlockKey]:
        """Add the keys of the blocks that became full, and return them. `token_ids` are all tokens so far."""
        num_known, size = len(self.keys), self.block_size
        end = len(token_ids) // size
        cuts = {self._last_scan_chunk_block, *self._spans, *(index + 1 for index in self._spans)}
        for first, last in pairwise([num_known, *sorted(cut for cut in cuts if num_known < cut < end), end]):
            hashes = hash_blocks(self._parent_hash(first), token_ids[first * size : last * size], size)
            self.keys += [BlockKey(block_hash, size, self._tenant_tag) for block_hash in hashes]
        return self.keys[num_known:]

    def hash_tail_block(self, token_ids: Sequence[int]) -> BlockKey | None:
        """Return the key of a prompt's last block if it is partial. Call `hash_full_blocks` with the prompt before."""
        num_full = len(token_ids) // self.block_size
        rest = token_ids[num_full * self.block_size :]
        if not rest:
            return None
        (tail_hash,) = hash_blocks(self._parent_hash(num_full), rest, self.block_size)
        return BlockKey(tail_hash, len(rest), self._tenant_tag)

    def name_answers_apart(self, num_prompt_tokens: int) -> None:
        """Give the blocks that will hold tokens of the answer other keys than if all their tokens were the prompt's.

        Where prompts and answers are computed with other weights, or by another attention, the same token has another
        KV in each. The full blocks of the prompt have their keys already, and a partial one has the key that
        `hash_tail_block` returned.
        """
        self._first_answer_block, self.num_prompt_tokens = len(self.keys), num_prompt_tokens

    def _parent_hash(self, index: int) -> bytes:
        parent = self.keys[index - 1].hash if index else self._root
        if index == self._last_scan_chunk_block:
            parent = hashlib.sha256(b"prompt" + self.num_prompt_tokens.to_bytes(8, "little") + parent).digest()
        if index == self._first_answer_block:
            parent = hashlib.sha256(b"answer" + self.num_prompt_tokens.to_bytes(8, "little") + parent).digest()
        for span in self._spans.get(index, ()):
            place = _PLACE.pack(span.row, span.first, span.num_tokens)
            parent = hashlib.sha256(b"picture" + span.name + place + parent).digest()
        return parent


@dataclass(eq=False)
class PromptBlocks:
    """The keys of the blocks of one prompt, and of the tokens after it."""

    hasher: BlockHasher
    """Has the keys of the full blocks, and adds those of the output."""
    tail_key: BlockKey | None
    """Key of the prompt's last block, if that is partial."""
    num_full_blocks: int
    """Full blocks of the prompt."""
    num_state_parts: int = 0
    """Block-sized parts in which the recurrent state is stored; 0 if the model has none."""

    num_handed_blocks: int = 0
    """Full blocks of prompt and answer that a job came with; 0 if it is none."""

    def prompt_keys(self) -> list[BlockKey]:
        """Return the keys of the prompt's blocks, a partial last one included."""
        keys = self.hasher.keys[: self.num_full_blocks]
        return [*keys, self.tail_key] if self.tail_key else keys

    def make_state_keys(self, position: int) -> list[BlockKey]:
        """Return the keys of the parts of the state after `position` tokens: full blocks, or the whole prompt."""
        if position == 0 or self.num_state_parts == 0:  # an unreadable job has no prompt
            return []
        if position == self.hasher.num_prompt_tokens:
            last = self.prompt_keys()[-1]
        else:
            last = self.hasher.keys[position // self.hasher.block_size - 1]
        return [
            BlockKey(derive_state_hash(last.hash, part), 0, last.tenant_tag) for part in range(self.num_state_parts)
        ]

    def handed_keys(self) -> list[BlockKey]:
        """Return the keys of all blocks that a job may have leased: its prompt's blocks, the state at their end, and
        the full blocks after them that came with the job.
        """
        answer_keys = self.hasher.keys[self.num_full_blocks : self.num_handed_blocks]
        return self.prompt_keys() + answer_keys + self.make_state_keys(self.hasher.num_prompt_tokens)

    @property
    def last_hash(self) -> str:
        """Hash of the prompt's last block in hex. It covers all tokens of the prompt."""
        return self.prompt_keys()[-1].hash.hex()
