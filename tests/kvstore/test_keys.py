"""Equal keys mean the same model, the same tenant and the same tokens from the first on, in every process."""

import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from itertools import pairwise

from hypothesis import assume, given
from hypothesis import strategies as st

from penstock.config.settings import KVSettings
from penstock.kvstore.block import (
    BlockHasher,
    BlockKey,
    Span,
    derive_tenant_salt,
    derive_tenant_tag,
    hash_blocks,
    hash_chain_root,
)
from penstock.kvstore.store import KVStore, StoreLayout

FINGERPRINT = "5a" * 32
ROOT = hash_chain_root(FINGERPRINT, derive_tenant_salt("secret", "default"))
TOKENS = st.lists(st.integers(0, 2**31 - 1), max_size=40)
SIZES = st.integers(1, 16)


@given(TOKENS, SIZES)
def test_one_key_a_block_and_all_different(tokens: list[int], size: int) -> None:
    keys = hash_blocks(ROOT, tokens, size)
    assert len(keys) == -(-len(tokens) // size)
    assert len({ROOT, *keys}) == len(keys) + 1
    assert all(len(key) == 32 for key in keys)


@given(TOKENS, SIZES, st.data())
def test_another_token_changes_every_key_from_there_on(tokens: list[int], size: int, data: st.DataObject) -> None:
    assume(tokens)
    place = data.draw(st.integers(0, len(tokens) - 1))
    other = data.draw(st.integers(0, 2**31 - 1).filter(lambda token: token != tokens[place]))
    before = hash_blocks(ROOT, tokens, size)
    after = hash_blocks(ROOT, [*tokens[:place], other, *tokens[place + 1 :]], size)
    same = place // size
    assert before[:same] == after[:same]
    assert set(before[same:]).isdisjoint(after[same:])


@given(st.lists(st.integers(0, 2**31 - 1), min_size=2, max_size=40), SIZES)
def test_a_partial_block_has_another_key_than_the_full_one(tokens: list[int], size: int) -> None:
    assert hash_blocks(ROOT, tokens, size)[-1] != hash_blocks(ROOT, tokens[:-1], size)[-1]


@given(TOKENS, SIZES, st.lists(st.integers(0, 40), max_size=5))
def test_a_chain_that_grows_names_what_a_whole_one_does(tokens: list[int], size: int, looks: list[int]) -> None:
    tag = derive_tenant_tag(b"salt")
    chain = BlockHasher(ROOT, tag, size)
    added: list[BlockKey] = []
    for length in [*sorted(looks), len(tokens)]:
        added += chain.hash_full_blocks(tokens[: min(length, len(tokens))])
    num_full = len(tokens) // size
    keys = hash_blocks(ROOT, tokens, size)
    assert added == chain.keys == [BlockKey(key, size, tag) for key in keys[:num_full]]
    assert chain.hash_full_blocks(tokens) == []
    rest = len(tokens) % size
    assert chain.hash_tail_block(tokens) == (BlockKey(keys[-1], rest, tag) if rest else None)


@given(TOKENS, SIZES, st.data())
def test_answers_that_are_named_apart_share_the_prompts_full_blocks_alone(
    tokens: list[int], size: int, data: st.DataObject
) -> None:
    def hash_with_prompt(num_prompt: int) -> list[bytes]:
        chain = BlockHasher(ROOT, derive_tenant_tag(b"salt"), size)
        chain.hash_full_blocks(tokens[:num_prompt])
        chain.name_answers_apart(num_prompt)
        for length in range(num_prompt, len(tokens) + 1):
            chain.hash_full_blocks(tokens[:length])
        return [key.hash for key in chain.keys]

    first, second = (data.draw(st.integers(0, len(tokens))) for _ in range(2))
    plain = hash_blocks(ROOT, tokens, size)[: len(tokens) // size]
    found, other = hash_with_prompt(first), hash_with_prompt(second)
    assert found[: first // size] == plain[: first // size]
    assert set(found[first // size :]).isdisjoint(plain)
    shared = len(tokens) // size if first == second else min(first, second) // size
    assert found[:shared] == other[:shared]
    assert set(found[shared:]).isdisjoint(other[shared:])


def map_rows(spans: Iterable[Span]) -> dict[int, tuple[bytes, int]]:
    """Return which row of which picture each token stands for."""
    return {one.first + step: (one.name, one.row + step) for one in spans for step in range(one.num_tokens)}


def hash_pictures(tokens: list[int], spans: Iterable[Span], size: int, steps: Iterable[int] = ()) -> list[bytes]:
    """Return the hashes of all blocks, the partial one included, of a sequence that grows in these steps."""
    chain = BlockHasher(ROOT, derive_tenant_tag(b"salt"), size, spans=[*spans])
    for length in sorted(steps):
        chain.hash_full_blocks(tokens[:length])
    chain.hash_full_blocks(tokens)
    tail = chain.hash_tail_block(tokens)
    return [key.hash for key in (*chain.keys, *([tail] if tail else []))]


@given(st.integers(1, 9), st.data())
def test_blocks_with_rows_of_pictures_are_named_by_picture_row_and_place(size: int, data: st.DataObject) -> None:
    """Ids are the same everywhere, so only the spans tell blocks apart."""
    length = data.draw(st.integers(1, 40))
    tokens = [7] * length
    cuts = sorted(data.draw(st.lists(st.integers(0, length), min_size=2, max_size=6, unique=True)))
    spans = [
        Span(first, end - first, data.draw(st.sampled_from(PICTURES)), data.draw(st.integers(0, 3)))
        for first, end in list(pairwise(cuts))[::2]
    ]
    found = hash_pictures(tokens, spans, size)
    assert found == hash_pictures(tokens, spans, size, data.draw(st.lists(st.integers(0, length))))
    assert found == hash_pictures(tokens, [row for span in spans for row in cut_rows(span, size)], size)
    plain = hash_blocks(ROOT, tokens, size)
    num_plain = spans[0].first // size
    assert found[:num_plain] == plain[:num_plain]
    assert set(found[num_plain:]).isdisjoint(plain)
    at = data.draw(st.integers(0, len(spans) - 1))
    changed = data.draw(st.sampled_from(list(change_span(spans[at]))))
    after = [*spans[:at], *changed, *spans[at + 1 :]]
    other, rows, other_rows = hash_pictures(tokens, after, size), map_rows(spans), map_rows(after)
    num_same = next(place for place in range(length) if rows.get(place) != other_rows.get(place)) // size
    assert found[:num_same] == other[:num_same]
    assert set(found[num_same:]).isdisjoint(other)


PICTURES = [bytes([number]) * 32 for number in range(3)]


def cut_rows(span: Span, size: int) -> Iterator[Span]:
    """Yield what blocks have of a span, as spans of their own."""
    bounds = [span.first, *range((span.first // size + 1) * size, span.end, size), span.end]
    for first, end in pairwise(bounds):
        yield Span(first, end - first, span.name, span.row + first - span.first)


def change_span(span: Span) -> Iterator[list[Span]]:
    """Yield what may be in its place and means something else: text, another picture, other rows, rows elsewhere."""
    yield []
    yield [span._replace(name=b"other" + bytes(27))]
    yield [span._replace(row=span.row + 1)]
    if span.num_tokens > 1:
        yield [span._replace(first=span.first + 1, num_tokens=span.num_tokens - 1)]
        yield [span._replace(num_tokens=1), Span(span.first + 1, 1, span.name, span.row)]


def keys_of(tenant: str, secret: str, fingerprint: str, block_size: int = 4, adapter: str = "") -> set[bytes]:
    layout = StoreLayout(fingerprint, block_size, 8, "float32")
    blocks = KVStore(layout, [], KVSettings(salt_secret=secret)).hash_prompt(tenant, range(13), adapter=adapter)
    return {name.hash for name in blocks.prompt_keys()}


def test_tenants_secrets_models_adapters_and_block_sizes_share_no_keys() -> None:
    """The fingerprint covers the block size; the keys of full blocks differ by it all the same."""
    found = [
        keys_of("default", "secret", FINGERPRINT),
        keys_of("other", "secret", FINGERPRINT),
        keys_of("default", "other", FINGERPRINT),
        keys_of("default", "secret", "5b" * 32),
        keys_of("default", "secret", FINGERPRINT, block_size=3),
        keys_of("default", "secret", FINGERPRINT, adapter="01" * 32),
        keys_of("default", "secret", FINGERPRINT, adapter="02" * 32),
        keys_of("other", "secret", FINGERPRINT, adapter="01" * 32),
    ]
    assert len(set.union(*found)) == sum(map(len, found))


@given(st.text(max_size=20), st.text(max_size=20))
def test_salts(one: str, two: str) -> None:
    assert (derive_tenant_salt("secret", one) == derive_tenant_salt("secret", two)) == (one == two)
    assert (derive_tenant_salt(one, "tenant") == derive_tenant_salt(two, "tenant")) == (
        one.rstrip("\0") == two.rstrip("\0")
    )


GOLDEN = [
    "b9aa7ab553d4bdae7f30c56e9ccc6f087cd3bd5be6b892d625a3812ea3382f9d",
    "92200f7480fcbe65736dea95fa0950fb2d55199904500aa9f1f2d731e7762494",
    "3855a8cbfe132cd95c8fc25f3bc4817f1568c9208bf3c7b3ee621995559c52a2",
]
PROGRAM = f"""
from penstock.kvstore.block import hash_blocks, hash_chain_root, derive_tenant_salt
root = hash_chain_root({FINGERPRINT!r}, derive_tenant_salt("secret", "default"))
print(*(key.hex() for key in hash_blocks(root, [302, 17, 4, 2**31 - 1, 0], 2)))
"""


def test_keys_are_the_same_in_every_process_and_version() -> None:
    assert [key.hex() for key in hash_blocks(ROOT, [302, 17, 4, 2**31 - 1, 0], 2)] == GOLDEN
    environment = {**os.environ, "PYTHONHASHSEED": "7"}
    other = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, env=environment)
    assert other.stdout.split() == GOLDEN
