"""What a worker retains: of which prompt, until when, and how much of each tenant."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from penstock.config.settings import KVSettings
from penstock.kvstore.block import BlockKey
from penstock.kvstore.retention import RetentionChange, Retentions
from penstock.kvstore.store import KVStore
from penstock.kvstore.transfers import Transfers
from sim.waiting import wait_for
from tests.kvstore.test_store import LAYOUT, expected, fill, names_of, read
from tests.kvstore.test_transfers import Pool, store_all

BLOCK_BYTES = 100


class Clock:
    """A clock that tests set."""

    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def keys(text: str, prompt: str = "") -> list[BlockKey]:
    """Blocks of a prompt, one for each letter: each key covers the letters before it."""
    return [BlockKey((prompt + text[: end + 1]).encode(), 16, b"") for end in range(len(text))]


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def retentions(clock: Clock) -> Retentions:
    """Room for ten blocks of each tenant."""
    return Retentions(10 * BLOCK_BYTES, BLOCK_BYTES, clock)


def sizes(retentions: Retentions) -> object:
    return retentions.report_retentions()["bytes"]


def test_the_next_prompt_of_an_agent_takes_its_retention_over(retentions: Retentions) -> None:
    assert retentions.replace_retention("t", "turn 1", keys("system"), 60, 3) == RetentionChange(keys("system"), 60)
    num_held, change = retentions.take_over("t", "turn 2", keys("systXY"), num_found=4)
    assert num_held == 4
    assert change == RetentionChange(keys("syst"), 60, (*keys("system")[4:],))
    assert sizes(retentions) == {"t": 4 * BLOCK_BYTES}
    # At its end it has one of its own, or none, and then nothing of the agent is retained.
    assert retentions.replace_retention("t", "turn 2", keys("systXYZ"), 90, 6) == RetentionChange(keys("systXYZ"), 90)
    retentions.take_over("t", "turn 3", keys("systXYZabc"), num_found=0)
    assert retentions.replace_retention("t", "turn 3", keys("systXYZabc"), 0, 9).released == (*keys("systXYZ"),)
    assert sizes(retentions) == {}
    assert retentions.report_retentions() == {"bytes": {}, "retained": 6 + 4 + 7 + 7, "found": 4}


def test_a_prompt_that_only_begins_alike_leaves_an_agent_s_retention(retentions: Retentions) -> None:
    retentions.replace_retention("t", "agent", keys("system"), 60, 4)
    assert retentions.take_over("t", "other agent", keys("sysX"), num_found=3) == (3, RetentionChange())
    assert retentions.replace_retention("t", "other agent", keys("sysX"), 0, 4) == RetentionChange()
    assert retentions.take_over("t", "shorter", keys("sys"), num_found=3) == (3, RetentionChange())
    assert sizes(retentions) == {"t": 6 * BLOCK_BYTES}
    assert retentions.take_over("u", "other tenant", keys("system"), num_found=6) == (0, RetentionChange())


def test_two_answers_to_one_prompt_share_its_blocks(retentions: Retentions) -> None:
    retentions.replace_retention("t", "one", keys("sys1"), 60, 3)
    retentions.replace_retention("t", "two", keys("sys2"), 90, 3)
    assert sizes(retentions) == {"t": 5 * BLOCK_BYTES}
    _, change = retentions.take_over("t", "next", keys("sys2more"), num_found=4)
    assert change == RetentionChange(keys("sys2"), 90, (*keys("sys1")[3:],))


def test_a_retention_ends_by_itself(retentions: Retentions, clock: Clock) -> None:
    retentions.replace_retention("t", "one", keys("abc"), 60, 2)
    clock.now_s = 59.0
    assert sizes(retentions) == {"t": 3 * BLOCK_BYTES}
    clock.now_s = 60.0
    assert retentions.take_over("t", "two", keys("abc"), num_found=3) == (0, RetentionChange())
    assert sizes(retentions) == {}


def test_a_tenant_retains_no_more_than_its_share_and_the_soonest_to_end_make_room(
    retentions: Retentions, clock: Clock
) -> None:
    retentions.replace_retention("t", "long", keys("abcd", "1"), 600, 2)
    retentions.replace_retention("t", "short", keys("abcd", "2"), 60, 2)
    retentions.replace_retention("u", "other", keys("abcdefgh", "3"), 60, 2)
    change = retentions.replace_retention("t", "new", keys("abcd", "4"), 60, 2)
    assert change == RetentionChange(keys("abcd", "4"), 60, (*keys("abcd", "2"),))
    change = retentions.replace_retention("t", "longer than all", keys("abcdefghijkl", "5"), 60, 2)
    assert change.retained == keys("abcdefghijkl", "5")[:10], "of what does not fit the beginning is retained"
    assert set(change.released) == {*keys("abcd", "1"), *keys("abcd", "4")}
    assert sizes(retentions) == {"t": 10 * BLOCK_BYTES, "u": 8 * BLOCK_BYTES}
    assert not Retentions(BLOCK_BYTES - 1, BLOCK_BYTES).replace_retention("t", "none", keys("ab"), 60, 2).retained


def test_what_was_retained_for_long_counts_for_as_long_though_a_later_prompt_asks_for_less(
    retentions: Retentions, clock: Clock
) -> None:
    retentions.replace_retention("t", "one", keys("abc"), 3600, 2)
    clock.now_s = 10.0
    retentions.take_over("t", "two", keys("abc"), num_found=3)
    retained, seconds, _ = retentions.replace_retention("t", "two", keys("abc"), 1, 3)
    assert (retained, seconds) == (keys("abc"), 3600.0), "the tiers keep the longer time"
    clock.now_s = 12.0
    assert sizes(retentions) == {"t": 3 * BLOCK_BYTES}
    assert retentions.take_over("t", "three", keys("abcd"), num_found=3)[1].seconds == 3600.0
    assert retentions.replace_retention("t", "three", keys("abcd"), 0, 4).released == (*keys("abc"),)
    assert sizes(retentions) == {}


def test_blocks_of_a_dropped_retention_that_others_have_for_less_count_until_its_end(
    retentions: Retentions, clock: Clock
) -> None:
    """The tiers know no owners: there they stay for as long, so that a tenant could have more than its share."""
    retentions.replace_retention("t", "long", keys("systX"), 3600, 5)
    retentions.replace_retention("t", "short", keys("systY"), 60, 5)
    retentions.take_over("t", "its next", keys("systX1"), num_found=5)
    change = retentions.replace_retention("t", "its next", keys("systX1"), 0, 6)
    assert change == RetentionChange(released=(*keys("systX")[4:],))
    clock.now_s = 61.0
    assert sizes(retentions) == {"t": 4 * BLOCK_BYTES}
    change = retentions.replace_retention("t", "much", keys("abcdefgh", "2"), 60, 8)
    assert change.released == (*keys("syst"),), "they make room as others do"
    retentions.replace_retention("t", "again", keys("systZ"), 60, 5)
    assert sizes(retentions) == {"t": 5 * BLOCK_BYTES}
    clock.now_s = 3601.0
    assert sizes(retentions) == {}


def test_prompts_that_share_blocks_name_them_a_few_times_at_most(retentions: Retentions) -> None:
    for number in range(100):
        prompt = [*keys("systems"), *keys(chr(97 + number), "systems")]
        retentions.replace_retention("t", f"agent {number}", prompt, 3600, 8)
        retentions.replace_retention("t", f"same {number}", keys("systems"), 3600 + number, 7)
    kept = retentions._tenants["t"]
    assert sum(len(one.keys) for one in kept.values()) <= 40
    assert "same 99" in kept


def test_nothing_is_kept_of_a_tenant_whose_retentions_have_ended(retentions: Retentions, clock: Clock) -> None:
    for number in range(20):
        retentions.replace_retention(f"tenant {number}", "one", keys("abc"), 60, 3)
        retentions.take_over(f"stranger {number}", "two", keys("abc"), num_found=3)
        retentions.replace_retention(f"stranger {number}", "two", keys("abc"), 0, 3)
    assert len(retentions._tenants) == len(retentions._held) == 20
    clock.now_s = 60.0
    assert sizes(retentions) == {}
    assert not retentions._tenants
    assert not retentions._held


def test_the_share_is_of_the_pool_or_the_largest_tier(tmp_path: Path) -> None:
    settings = KVSettings(shared_mb=2, shared_dir=str(tmp_path), redis_mb=0, retained_share=0.25)
    with closing(KVStore.open(LAYOUT, settings, "", "demo")) as store:
        assert store.make_retentions(2**20).max_blocks == 2**19 // LAYOUT.payload_bytes
        assert store.make_retentions(2**24).max_blocks == 2**22 // LAYOUT.payload_bytes


@pytest.fixture
def store(tmp_path: Path) -> Iterator[KVStore]:
    settings = KVSettings(shared_mb=1, shared_dir=str(tmp_path), disk_mb=1, disk_dir=str(tmp_path / "d"), redis_mb=0)
    with closing(KVStore.open(LAYOUT, settings, "", "demo")) as store:
        yield store


def count_retained(store: KVStore) -> list[int]:
    return [tier.read_usage().retained for tier in store.tiers]


@pytest.fixture
def transfers(store: KVStore) -> Iterator[Transfers]:
    with closing(Transfers(store, Pool(), 10)) as transfers:
        yield transfers


def test_blocks_that_a_lower_tier_has_lost_are_written_to_it_again(store: KVStore, transfers: Transfers) -> None:
    names = fill(store)
    shared, disk = store.tiers
    disk.remove_blocks([name.hash for name in names[1:3]])
    shared.remove_blocks([names[0].hash, names[2].hash])  # the third one is nowhere now
    transfers.submit_retention(names, 60)
    wait_for(lambda: count_retained(store) == [len(names) - 2, len(names) - 1], "all is retained in both tiers")
    shared.remove_blocks([name.hash for name in names])
    assert [payload for payload, _ in read(store)] == expected()[:2], "what the disk had lost it has again"


def test_a_retention_comes_behind_the_writes_that_wait(store: KVStore, transfers: Transfers) -> None:
    store_all(transfers, store)
    names = names_of(store)
    transfers.submit_retention(names, 60)
    wait_for(lambda: count_retained(store) == [len(names)] * 2, "the blocks are retained")
    transfers.submit_retention(names[:1], 0)
    wait_for(lambda: count_retained(store) == [len(names) - 1] * 2, "one is not retained any more")
    list(transfers.collect_finished())
