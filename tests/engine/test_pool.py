from penstock.engine.memory.pool import BlockPool


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
    assert pool.count_free_blocks_besides([b"a", b"c"]) == 1, "c was kept, and a is pinned"
    pool.allocate_blocks(2)  # the free one, then `c`, the end of the prefix
    assert pool.count_cached_prefix([b"a", b"b", b"c"]) == 2
    assert pool.num_evictions == 1
    pool.check_integrity()


def test_the_first_block_with_a_key_keeps_it() -> None:
    pool = BlockPool(2, 16)
    first, second = pool.allocate_blocks(2)
    pool.register_block(first, b"a")
    pool.register_block(second, b"a")
    pool.register_block(first, b"b")
    pool.free_blocks([first, second])
    assert pool.pin_cached_prefix([b"a", b"b"]) == [first]
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
