import random

from hypothesis import given
from hypothesis import strategies as st

from penstock.engine.pool import BlockPool


def test_blocks_are_kept_for_their_keys_until_the_space_is_needed() -> None:
    pool = BlockPool(4, 16)
    blocks = pool.allocate_blocks(3)
    for block, key in zip(blocks, (b"a", b"b", b"c"), strict=True):
        pool.register_block(block, key)
    pool.free_blocks(blocks)
    assert pool.num_free_blocks == 4
    assert pool.count_cached_prefix([b"a", b"b", b"x", b"c"]) == 2
    assert pool.pin_cached_prefix([b"a", b"b", b"x"]) == blocks[:2]
    assert (pool.num_hits, pool.num_misses) == (2, 1)
    pool.allocate_blocks(2)  # the free one, then `c`, the end of the prefix
    assert pool.count_cached_prefix([b"a", b"b", b"c"]) == 2
    assert pool.num_evictions == 1
    pool.check_integrity()


def test_the_first_block_with_a_key_keeps_it() -> None:
    pool = BlockPool(2, 16)
    first, second = pool.allocate_blocks(2)
    pool.register_block(first, b"a")
    pool.register_block(second, b"a")
    pool.free_blocks([first, second])
    assert pool.pin_cached_prefix([b"a"]) == [first]
    pool.check_integrity()


def test_what_releasing_would_free() -> None:
    pool = BlockPool(8, 16)
    first = pool.allocate_blocks(3)
    pool.register_block(first[0], b"a")
    pool.register_block(first[1], b"b")
    second = pool.pin_cached_prefix([b"a", b"b"]) + pool.allocate_blocks(2)
    assert pool.count_blocks_freed([first], []) == 1
    assert pool.count_blocks_freed([second], []) == 2
    assert pool.count_blocks_freed([first, second], []) == 5
    assert pool.count_blocks_freed([first, second], [b"a"]) == 4
    assert [pool.count_pins(block) for block in first] == [2, 2, 1]


@given(st.integers(0, 2**32), st.integers(1, 12))
def test_integrity_after_any_history(seed: int, num_blocks: int) -> None:
    rng = random.Random(seed)
    pool = BlockPool(num_blocks, 4)
    keys = [bytes([n]) for n in range(8)]
    holders: list[list[int]] = []
    for _ in range(60):
        choice = rng.random()
        if choice < 0.35 and pool.num_free_blocks:
            holders.append(pool.allocate_blocks(rng.randint(1, pool.num_free_blocks)))
        elif choice < 0.55:
            wanted = rng.sample(keys, 3)
            count = pool.count_cached_prefix(wanted)
            beside = pool.count_free_blocks_besides(wanted[:count])
            taken = pool.pin_cached_prefix(wanted)
            assert len(taken) == count
            assert pool.num_free_blocks == beside
            holders.append(taken)
        elif choice < 0.75 and holders:
            for block in rng.choice(holders):
                pool.register_block(block, rng.choice(keys))
        elif holders:
            pool.free_blocks(holders.pop(rng.randrange(len(holders))))
        pool.check_integrity()
    for blocks in holders:
        pool.free_blocks(blocks)
    pool.check_integrity()
    assert pool.num_free_blocks == num_blocks
