"""Blocks for tests: what is in one follows from its key, so that every read can be checked."""

import hashlib
import random
import uuid
from collections.abc import Callable, Sequence

from penstock.kvstore.block import Block, Form, Name, Wanted, always
from penstock.kvstore.tiers.contract import Tier

PAYLOAD_BYTES = 3000
TAG = hashlib.sha256(b"a tenant").digest()[:16]
NUM_TOKENS = 16


def make_form(model: str = "a model", payload_bytes: int = PAYLOAD_BYTES) -> Form:
    """What the blocks of a model have in common."""
    digest = hashlib.sha256(model.encode()).digest()
    return Form(digest, digest[16:], payload_bytes)


FORM = make_form()


def new_name(num_tokens: int = NUM_TOKENS) -> Name:
    """The name of a block that nobody else uses."""
    return Name(uuid.uuid4().bytes * 2, num_tokens, TAG)


def new_names(count: int) -> list[Name]:
    """Names of blocks that nobody else uses."""
    return [new_name() for _ in range(count)]


def content(name: Name, form: Form = FORM) -> bytes:
    """The payload that belongs to a name."""
    return random.Random(name.key).randbytes(form.payload_bytes)


def block(name: Name, form: Form = FORM, is_valid: Callable[[], bool] = always) -> Block:
    """A block with the payload that belongs to its name."""
    return Block(name, memoryview(content(name, form)), is_valid)


def put(tier: Tier, names: Sequence[Name], form: Form = FORM) -> list[bool]:
    """Store the blocks of these names."""
    return tier.put([block(name, form) for name in names])


def read(tier: Tier, names: Sequence[Name], form: Form = FORM) -> list[bytes | None]:
    """What the tier gives for each name."""
    places = [bytearray(form.payload_bytes) for _ in names]
    whole = tier.get([Wanted(name, memoryview(place)) for name, place in zip(names, places, strict=True)])
    return [bytes(place) if is_whole else None for place, is_whole in zip(places, whole, strict=True)]


def is_here(tier: Tier, names: Sequence[Name]) -> list[bool]:
    """Which of the names the tier has; they were used now."""
    return tier.has([name.key for name in names])


def keys_of(names: Sequence[Name]) -> list[bytes]:
    """Their keys, in order."""
    return [name.key for name in names]
