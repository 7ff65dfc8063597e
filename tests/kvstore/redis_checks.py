"""What tests of the Redis tier share."""

from penstock.kvstore.block import HEADER_BYTES, BlockFormat
from penstock.kvstore.tiers.redis import RedisTier
from tests.kvstore.blocks import FORM, PAYLOAD_BYTES, content, is_here, keys_of, make_form, new_names, put, read

AMPLE = 2**24
STORED_BYTES = HEADER_BYTES + PAYLOAD_BYTES
LARGE_FORM = make_form("a large model", 300_000)


def check_away(tier: RedisTier, form: BlockFormat = FORM) -> None:
    before, names = tier.counters.errors, new_names(2)
    assert read(tier, names, form) == [None, None]
    assert put(tier, names, form) == [False, False]
    assert is_here(tier, names) == [False, False]
    tier.lease_blocks("a job", keys_of(names), 1)
    tier.release_leases("a job", keys_of(names))
    assert tier.remove_blocks(keys_of(names)) == 0
    assert tier.read_usage().blocks == 0
    assert list(tier.list_entries()) == []
    assert tier.counters.errors == before + 8


def check_works(tier: RedisTier, form: BlockFormat = FORM) -> None:
    names = new_names(20)
    assert put(tier, names, form) == [True] * 20
    tier.lease_blocks("a job", keys_of(names), 60)
    assert read(tier, names, form) == [content(name, form) for name in names]
    assert (tier.read_usage().blocks, tier.read_usage().leased) == (20, 20)
    tier.release_leases("a job", keys_of(names))
    assert tier.check_integrity() == []
    assert tier.remove_blocks(keys_of(names)) == 20
    assert tier.counters.errors == 0
    tier.close()
