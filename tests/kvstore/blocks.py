"""Blocks for tests: what is in one follows from its key, so that every read can be checked."""

import hashlib
import random
import uuid
from collections.abc import Callable, Sequence

from penstock.kvstore.block import Block, BlockFormat, BlockKey, ReadRequest, is_always_valid
from penstock.kvstore.tiers.contract import Tier

PAYLOAD_BYTES = 3000
TAG = hashlib.sha256(b"a tenant").digest()[:16]
NUM_TOKENS = 16


def make_form(model: str = "a model", payload_bytes: int = PAYLOAD_BYTES) -> BlockFormat:
    """What the blocks of a model have in common."""
    digest = hashlib.sha256(model.encode()).digest()
    return BlockFormat(digest, digest[16:], payload_bytes)


FORM = make_form()


def new_name(num_tokens: int = NUM_TOKENS) -> BlockKey:
    """The name of a block that nobody else uses."""
    return BlockKey(uuid.uuid4().bytes * 2, num_tokens, TAG)


def new_names(count: int) -> list[BlockKey]:
    """Names of blocks that nobody else uses."""
    return [new_name() for _ in range(count)]


def content(name: BlockKey, form: BlockFormat = FORM) -> bytes:
    """The payload that belongs to a name. It does not end with a zero, which memory that is cut there has, too."""
    return random.Random(name.hash).randbytes(form.payload_bytes - 1) + b"\1"


def block(name: BlockKey, form: BlockFormat = FORM, is_valid: Callable[[], bool] = is_always_valid) -> Block:
    """A block with the payload that belongs to its name."""
    return Block(name, memoryview(content(name, form)), is_valid)


def put(tier: Tier, names: Sequence[BlockKey], form: BlockFormat = FORM) -> list[bool]:
    """Store the blocks of these names."""
    return tier.put([block(name, form) for name in names])


def read(tier: Tier, names: Sequence[BlockKey], form: BlockFormat = FORM) -> list[bytes | None]:
    """What the tier gives for each name."""
    places = [bytearray(form.payload_bytes) for _ in names]
    whole = tier.get([ReadRequest(name, memoryview(place)) for name, place in zip(names, places, strict=True)])
    return [bytes(place) if is_whole else None for place, is_whole in zip(places, whole, strict=True)]


def is_here(tier: Tier, names: Sequence[BlockKey]) -> list[bool]:
    """Which of the names the tier has; they were used now."""
    return tier.has_blocks([name.hash for name in names])


def keys_of(names: Sequence[BlockKey]) -> list[bytes]:
    """Their keys, in order."""
    return [name.hash for name in names]
