"""Equal keys mean the same model, the same tenant and the same tokens from the first on, in every process."""

import os
import subprocess
import sys

from hypothesis import assume, given
from hypothesis import strategies as st

from penstock.config.settings import KVSettings
from penstock.kvstore.block import Name, chain_keys, chain_root, tenant_salt, tenant_tag
from penstock.kvstore.chain import Chain
from penstock.kvstore.codec import PayloadShape
from penstock.kvstore.store import KVStore, Layout

FINGERPRINT = "5a" * 32
ROOT = chain_root(FINGERPRINT, tenant_salt("secret", "default"))
TOKENS = st.lists(st.integers(0, 2**31 - 1), max_size=40)
SIZES = st.integers(1, 16)


@given(TOKENS, SIZES)
def test_one_key_a_block_and_all_different(tokens: list[int], size: int) -> None:
    keys = chain_keys(ROOT, tokens, size)
    assert len(keys) == -(-len(tokens) // size)
    assert len({ROOT, *keys}) == len(keys) + 1
    assert all(len(key) == 32 for key in keys)


@given(TOKENS, TOKENS, TOKENS, SIZES)
def test_the_same_prefix_has_the_same_keys(prefix: list[int], one: list[int], two: list[int], size: int) -> None:
    first, second = chain_keys(ROOT, prefix + one, size), chain_keys(ROOT, prefix + two, size)
    num_full = len(prefix) // size
    assert first[:num_full] == second[:num_full] == chain_keys(ROOT, prefix[: num_full * size], size)


@given(TOKENS, SIZES, st.data())
def test_another_token_changes_every_key_from_there_on(tokens: list[int], size: int, data: st.DataObject) -> None:
    assume(tokens)
    place = data.draw(st.integers(0, len(tokens) - 1))
    other = data.draw(st.integers(0, 2**31 - 1).filter(lambda token: token != tokens[place]))
    before = chain_keys(ROOT, tokens, size)
    after = chain_keys(ROOT, [*tokens[:place], other, *tokens[place + 1 :]], size)
    same = place // size
    assert before[:same] == after[:same]
    assert set(before[same:]).isdisjoint(after[same:])


@given(st.lists(st.integers(0, 2**31 - 1), min_size=2, max_size=40), SIZES)
def test_a_partial_block_has_another_key_than_the_full_one(tokens: list[int], size: int) -> None:
    assert chain_keys(ROOT, tokens, size)[-1] != chain_keys(ROOT, tokens[:-1], size)[-1]


@given(TOKENS, SIZES, st.lists(st.integers(0, 40), max_size=5))
def test_a_chain_that_grows_names_what_a_whole_one_does(tokens: list[int], size: int, looks: list[int]) -> None:
    tag = tenant_tag(b"salt")
    chain = Chain(ROOT, tag, size)
    added: list[Name] = []
    for length in [*sorted(looks), len(tokens)]:
        added += chain.extend(tokens[: min(length, len(tokens))])
    num_full = len(tokens) // size
    keys = chain_keys(ROOT, tokens, size)
    assert added == chain.names == [Name(key, size, tag) for key in keys[:num_full]]
    assert chain.extend(tokens) == []
    rest = len(tokens) % size
    assert chain.tail(tokens) == (Name(keys[-1], rest, tag) if rest else None)


def keys_of(
    tenant: str, secret: str, fingerprint: str, block_size: int = 4, settings: KVSettings | None = None
) -> set[bytes]:
    layout = Layout(fingerprint, block_size, 8, PayloadShape("float32", ((block_size, 1),)))
    settings = (settings or KVSettings()).model_copy(update={"salt_secret": secret})
    chain = KVStore(layout, [], settings).chain(tenant)
    chain.extend(range(12))
    return {name.key for name in chain.names}


def test_tenants_secrets_models_and_block_sizes_share_no_keys() -> None:
    """The fingerprint covers the block size; the keys of full blocks differ by it all the same."""
    found = [
        keys_of("default", "secret", FINGERPRINT),
        keys_of("other", "secret", FINGERPRINT),
        keys_of("default", "other", FINGERPRINT),
        keys_of("default", "secret", "5b" * 32),
        keys_of("default", "secret", FINGERPRINT, block_size=3),
        keys_of("default", "secret", FINGERPRINT, settings=KVSettings(redis_codec="int8")),
    ]
    assert len(set.union(*found)) == sum(map(len, found))


@given(st.text(max_size=20), st.text(max_size=20))
def test_salts(one: str, two: str) -> None:
    assert (tenant_salt("secret", one) == tenant_salt("secret", two)) == (one == two)
    assert (tenant_salt(one, "tenant") == tenant_salt(two, "tenant")) == (one.rstrip("\0") == two.rstrip("\0"))


GOLDEN = [
    "b9aa7ab553d4bdae7f30c56e9ccc6f087cd3bd5be6b892d625a3812ea3382f9d",
    "92200f7480fcbe65736dea95fa0950fb2d55199904500aa9f1f2d731e7762494",
    "3855a8cbfe132cd95c8fc25f3bc4817f1568c9208bf3c7b3ee621995559c52a2",
]
PROGRAM = f"""
from penstock.kvstore.block import chain_keys, chain_root, tenant_salt
root = chain_root({FINGERPRINT!r}, tenant_salt("secret", "default"))
print(*(key.hex() for key in chain_keys(root, [302, 17, 4, 2**31 - 1, 0], 2)))
"""


def test_keys_are_the_same_in_every_process_and_version() -> None:
    assert [key.hex() for key in chain_keys(ROOT, [302, 17, 4, 2**31 - 1, 0], 2)] == GOLDEN
    environment = {**os.environ, "PYTHONHASHSEED": "7"}
    other = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, env=environment, timeout=60
    )
    assert other.stdout.split() == GOLDEN
