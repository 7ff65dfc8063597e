"""Which address holds a block."""

import random

from hypothesis import given
from hypothesis import strategies as st

from penstock.kvstore.tiers.spread import Spread, identity

URLS = st.lists(st.integers(0, 10_000).map(lambda n: f"redis://host{n}:6379/0"), min_size=1, max_size=8, unique=True)
KEYS = st.lists(st.binary(min_size=32, max_size=32), max_size=50)


@given(URLS, KEYS, st.randoms(use_true_random=False))
def test_the_order_of_addresses_does_not_matter(urls: list[str], keys: list[bytes], rng: random.Random) -> None:
    mixed = rng.sample(urls, len(urls))
    one, two = Spread(urls), Spread(mixed)
    assert [urls[one.place(key)] for key in keys] == [mixed[two.place(key)] for key in keys]


@given(URLS, KEYS)
def test_a_new_address_takes_keys_and_moves_no_others(urls: list[str], keys: list[bytes]) -> None:
    before, after = Spread(urls[:-1] or urls), Spread(urls)
    for key in keys:
        assert after.place(key) in (before.place(key), len(urls) - 1)


@given(URLS, KEYS)
def test_every_key_is_dealt_once(urls: list[str], keys: list[bytes]) -> None:
    dealt = Spread(urls).deal(keys)
    assert sorted(index for part in dealt.values() for index in part) == list(range(len(keys)))


def test_shares_are_about_equal_and_so_is_what_moves() -> None:
    rng, urls = random.Random(7), [f"redis://10.0.0.{n}:6379/0" for n in range(5)]
    keys = [rng.randbytes(32) for _ in range(10_000)]
    dealt = Spread(urls).deal(keys)
    assert all(1800 < len(dealt[place]) < 2200 for place in range(5))
    smaller = Spread(urls[:4])
    moved = sum(smaller.place(key) != Spread(urls).place(key) for key in keys[:1000])
    assert 150 < moved < 250


def test_a_new_password_moves_nothing() -> None:
    assert identity("redis://me:old@host:6379/1") == identity("redis://:n%40w@host:6379/1") == "redis://host:6379/1"
    assert identity("unix:///run/a.sock?db=1") != identity("unix:///run/a.sock?db=2")
