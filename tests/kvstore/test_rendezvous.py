"""Which address holds a block."""

import random

from hypothesis import given
from hypothesis import strategies as st

from penstock.kvstore.tiers.redis import RendezvousHash, url_identity

URLS = st.lists(st.integers(0, 10_000).map(lambda n: f"redis://host{n}:6379/0"), min_size=1, max_size=8, unique=True)
KEYS = st.lists(st.binary(min_size=32, max_size=32), max_size=50)


@given(URLS, KEYS, st.randoms(use_true_random=False))
def test_the_order_of_addresses_does_not_matter(urls: list[str], keys: list[bytes], rng: random.Random) -> None:
    mixed = rng.sample(urls, len(urls))
    one, two = RendezvousHash(urls), RendezvousHash(mixed)
    assert [urls[one.find_server(key)] for key in keys] == [mixed[two.find_server(key)] for key in keys]


@given(URLS, KEYS)
def test_a_new_address_takes_keys_and_moves_no_others(urls: list[str], keys: list[bytes]) -> None:
    before, after = RendezvousHash(urls[:-1] or urls), RendezvousHash(urls)
    for key in keys:
        assert after.find_server(key) in (before.find_server(key), len(urls) - 1)


@given(URLS, KEYS)
def test_every_key_is_dealt_once(urls: list[str], keys: list[bytes]) -> None:
    dealt = RendezvousHash(urls).group_by_server(keys)
    assert sorted(index for part in dealt.values() for index in part) == list(range(len(keys)))


def test_shares_are_about_equal_and_so_is_what_moves() -> None:
    rng, urls = random.Random(7), [f"redis://10.0.0.{n}:6379/0" for n in range(5)]
    keys = [rng.randbytes(32) for _ in range(10_000)]
    dealt = RendezvousHash(urls).group_by_server(keys)
    assert all(1800 < len(dealt[place]) < 2200 for place in range(5))
    smaller = RendezvousHash(urls[:4])
    moved = sum(smaller.find_server(key) != RendezvousHash(urls).find_server(key) for key in keys[:1000])
    assert 150 < moved < 250


def test_a_new_password_moves_nothing() -> None:
    assert (
        url_identity("redis://me:old@host:6379/1")
        == url_identity("redis://:n%40w@host:6379/1")
        == "redis://host:6379/1"
    )
    assert url_identity("unix:///run/a.sock?db=1") != url_identity("unix:///run/a.sock?db=2")
