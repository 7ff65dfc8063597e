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


class Retaining:
    """A pool in which all blocks are cached, and a clock."""

    def __init__(self, keys: bytes) -> None:
        self.now_s = 0.0
        self.pool = BlockPool(len(keys), 16, lambda: self.now_s)
        self.store([keys[at : at + 1] for at in range(len(keys))])

    def store(self, keys: list[bytes]) -> None:
        """Compute blocks with these keys one after the other."""
        for key in keys:
            blocks = self.pool.allocate_blocks(1)
            self.pool.register_block(blocks[0], key)
            self.pool.free_blocks(blocks)
            self.pool.check_integrity()

    def list_kept(self, keys: bytes) -> bytes:
        """Return those of the keys that the pool still has."""
        return bytes(key for key in keys if self.pool.count_cached_prefix([bytes([key])]))


def test_retained_blocks_are_evicted_after_all_others_until_their_retention_ends() -> None:
    here = Retaining(b"abcd")
    here.pool.retain_blocks([b"a", b"b", b"none"], 60.0)
    here.pool.retain_blocks([b"a"], 5.0)  # a shorter one does not replace a longer one
    here.pool.free_blocks(here.pool.pin_cached_prefix([b"a"]))
    here.store([b"e", b"f", b"g", b"h"])
    assert here.list_kept(b"abcdefgh") == b"abgh"
    here.now_s = 61.0
    here.store([b"i", b"j"])
    assert here.list_kept(b"abgh") == b"ab", "they count as used when the retention ended"
    here.store([b"k", b"l"])
    assert here.list_kept(b"abij") == b"ij"


def test_where_all_blocks_are_retained_the_soonest_to_end_goes_and_of_one_prompt_the_last() -> None:
    here = Retaining(b"abcd")
    here.pool.retain_blocks([b"a", b"b"], 60.0)
    here.pool.retain_blocks([b"c", b"d"], 30.0)
    assert here.pool.num_free_blocks == 4
    taken = here.pool.allocate_blocks(1)
    assert here.list_kept(b"abcd") == b"abc"
    taken += here.pool.allocate_blocks(2)
    assert here.list_kept(b"abcd") == b"a"
    here.pool.check_integrity()
    here.pool.free_blocks(taken)
    here.store([b"e", b"f", b"g", b"h"])
    assert here.list_kept(b"a") == b"a", "what is stored later goes before it"


def test_a_retention_can_be_ended_and_given_to_a_block_in_use() -> None:
    here = Retaining(b"abcd")
    here.pool.retain_blocks([b"a", b"b"], 60.0)
    pinned = here.pool.pin_cached_prefix([b"c"])
    here.pool.retain_blocks([b"c"], 60.0)
    here.pool.free_blocks(pinned)
    here.pool.retain_blocks([b"a"], 0.0)
    here.store([b"e", b"f", b"g"])
    assert here.list_kept(b"abcd") == b"bc"
    pinned = here.pool.pin_cached_prefix([b"b"])
    here.now_s = 61.0
    here.pool.free_blocks(pinned)
    here.store([b"h", b"i", b"j", b"k"])
    assert here.list_kept(b"bc") == b""
