"""The store: tiers in order, the prefix up to the first block nobody has, and never a wrong block."""

import hashlib
import os
import re
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.config.settings import KVSettings
from penstock.errors import KVStoreError
from penstock.kvstore.block import Block, BlockKey, ReadRequest
from penstock.kvstore.cost import NUM_PROBE_BLOCKS
from penstock.kvstore.room import fit_tiers
from penstock.kvstore.store import KVStore, StoreLayout
from penstock.local.processes import find_free_port
from tests.draws import mark_some
from tests.kvstore.places import DiskPlace, Place, RedisPlace, SharedPlace

SIZE = 4
LAYOUT = StoreLayout("5a" * 32, SIZE, 24, "float32")
PROMPT = list(range(100, 118))
"""18 tokens: four full blocks and one of two."""
ALL = 0b111
MakeStore = Callable[..., KVStore]


@pytest.fixture
def settings(tmp_path: Path) -> KVSettings:
    return KVSettings(
        shared_mb=1, shared_dir=str(tmp_path), disk_mb=1, disk_dir=str(tmp_path / "disk"), redis_mb=1, salt_secret="s"
    )


@pytest.fixture
def make_store(settings: KVSettings, kv_url: str, exits: ExitStack) -> MakeStore:
    """Opens stores that share their tiers, as workers of a host do."""
    RedisPlace(kv_url)  # empty

    def make(layout: StoreLayout = LAYOUT, url: str = kv_url, **changes: object) -> KVStore:
        return exits.enter_context(closing(KVStore.open(layout, settings.model_copy(update=changes), url, "demo")))

    return make


@pytest.fixture
def store(make_store: MakeStore) -> KVStore:
    return make_store()


@pytest.fixture
def places(tmp_path: Path, kv_url: str, store: KVStore) -> list[Place]:
    """Where the tiers of `store` are, for damage."""
    assert [tier.name for tier in store.tiers] == ["shared", "disk", "redis"]
    kept = RedisPlace.__new__(RedisPlace)
    kept._url = kv_url
    return [SharedPlace(tmp_path), DiskPlace(tmp_path / "disk", tmp_path), kept]


def names_of(store: KVStore, tokens: Sequence[int] = PROMPT, tenant: str = "t") -> list[BlockKey]:
    chain = store.make_hasher(tenant)
    chain.hash_full_blocks(tokens)
    tail = chain.hash_tail_block(tokens)
    return [*chain.keys, *([tail] if tail else [])]


def expected(tokens: Sequence[int] = PROMPT) -> list[bytes]:
    """A payload for each block, made of the tokens up to its end: what a model would make of them."""
    ends = range(SIZE, len(tokens) + SIZE, SIZE)
    return [hashlib.sha256(repr(list(tokens[:end])).encode()).digest()[: LAYOUT.payload_bytes] for end in ends]


def fill(store: KVStore, lack: int = ALL, tokens: Sequence[int] = PROMPT, tenant: str = "t") -> list[BlockKey]:
    names = names_of(store, tokens, tenant)
    blocks = [(Block(name, memoryview(one)), lack) for name, one in zip(names, expected(tokens), strict=True)]
    store.store_blocks(blocks, below=False)
    store.store_blocks(blocks, below=True)
    return names


def read(store: KVStore, tokens: Sequence[int] = PROMPT, tenant: str = "t", start: int = 0) -> list[tuple[bytes, int]]:
    """Payloads found, each with the tier it came from."""
    wanted = [
        ReadRequest(name, memoryview(bytearray(LAYOUT.payload_bytes)))
        for name in names_of(store, tokens, tenant)[start:]
    ]
    return [(bytes(one.target), depth) for one, depth in zip(wanted, store.load_blocks(wanted), strict=False)]


def found(depth: int, tokens: Sequence[int] = PROMPT) -> list[tuple[bytes, int]]:
    return [(payload, depth) for payload in expected(tokens)]


@pytest.mark.proof
def test_what_is_put_is_read_from_the_first_tier(store: KVStore) -> None:
    fill(store)
    assert read(store) == found(0)
    assert [tier.counters.hits for tier in store.tiers] == [5, 0, 0]
    assert [tier.counters.misses for tier in store.tiers] == [0, 0, 0]
    assert [tier.counters.bytes_written for tier in store.tiers] == [120, 120, 120]
    assert store.tiers[0].counters.bytes_read == 120


@pytest.mark.proof
def test_the_prefix_ends_at_the_first_block_that_no_tier_has(store: KVStore) -> None:
    names = fill(store)
    store.tiers[0].remove_blocks([names[0].hash, names[2].hash, names[3].hash])
    store.tiers[1].remove_blocks([names[0].hash, names[3].hash])
    store.tiers[2].remove_blocks([names[3].hash])
    payloads = expected()
    assert read(store) == [(payloads[0], 2), (payloads[1], 0), (payloads[2], 1)]
    assert read(store, start=3) == []
    assert read(store, start=4) == [(payloads[4], 0)]


@pytest.mark.parametrize("depth", mark_some([0, 1, 2], pytest.mark.proof))
def test_a_damaged_block_is_counted_and_the_next_tier_is_asked(store: KVStore, places: list[Place], depth: int) -> None:
    names = fill(store)
    for upper in store.tiers[:depth]:
        upper.remove_blocks([name.hash for name in names])
    tier = store.tiers[depth]
    places[depth].damage(tier, names[2].hash, lambda stored: stored[:-1] + bytes([stored[-1] ^ 1]))
    want = found(depth)
    if depth < 2:
        want[2] = (want[2][0], depth + 1)
    assert read(store) == (want if depth < 2 else want[:2])
    assert (tier.counters.hits, tier.counters.damaged) == (4, 1)
    assert tier.has_blocks([names[2].hash]) == [False]


def test_what_lies_behind_a_lost_block_is_not_read(store: KVStore, places: list[Place]) -> None:
    names = fill(store, 0b100)
    places[2].damage(store.tiers[2], names[0].hash, lambda stored: stored[:-1] + bytes([stored[-1] ^ 1]))
    assert read(store) == []
    assert store.tiers[2].counters.hits == NUM_PROBE_BLOCKS - 1, "of a tier whose speed is not known, a few come first"


@pytest.mark.proof
def test_another_tenant_model_or_prompt_reads_nothing_of_it(store: KVStore, make_store: MakeStore) -> None:
    fill(store)
    assert read(store, tenant="u") == []
    assert read(store, [7, *PROMPT[1:]]) == []
    assert read(store, [*PROMPT[:7], 7]) == found(0)[:1]
    assert read(make_store(StoreLayout("5b" * 32, SIZE, 24, LAYOUT.element))) == []
    assert read(make_store(salt_secret="other")) == []


def test_where_a_block_is_to_be_written(store: KVStore) -> None:
    names = fill(store, 0b110)
    keys = [name.hash for name in names]
    store.tiers[2].remove_blocks(keys[3:])
    depths = store.find_tiers(keys)
    assert depths == [1, 1, 1, 1, 1]
    assert store.hand_off_index == 2
    assert store.find_missing_tiers(keys, depths, hand_off=True) == [0b001, 0b001, 0b001, 0b101, 0b101]
    assert store.find_missing_tiers(keys, depths, hand_off=False) == [0b001] * 5
    assert store.find_missing_tiers(keys, [0] * 5, hand_off=True) == [0, 0, 0, 0b100, 0b100]
    assert [store.is_in_hand_off_tier(lack) for lack in (0b001, 0b101)] == [True, False]


@pytest.mark.proof
def test_the_hand_off_tier_is_the_first_that_all_can_read(make_store: MakeStore) -> None:
    store = make_store(redis_mb=0)
    assert store.hand_off_index == 0
    assert [store.is_missing_below(lack) for lack in (0b00, 0b01, 0b11)] == [False, False, True]
    assert [store.is_in_hand_off_tier(lack) for lack in (0b00, 0b01, 0b10)] == [True, False, True]
    names = names_of(store)
    blocks = [(Block(name, memoryview(one)), 0b11) for name, one in zip(names, expected(), strict=True)]
    store.store_blocks(blocks, below=False)
    assert [tier.read_usage().blocks for tier in store.tiers] == [5, 0]
    store.store_blocks(blocks, below=True)
    assert [tier.read_usage().blocks for tier in store.tiers] == [5, 5]
    assert make_store(redis_mb=0, shared_mb=0).hand_off_index == 0
    alone = make_store(redis_mb=0, shared_mb=0, disk_mb=0)
    assert (alone.hand_off_index, alone.all_tiers) == (-1, 0)
    assert read(alone) == []
    alone.lease_blocks("job", names)
    alone.release_leases("job", names)


@pytest.mark.proof
def test_leases_are_taken_in_the_hand_off_tier(store: KVStore) -> None:
    names = fill(store)
    store.lease_blocks("job", names)
    assert [tier.read_usage().leased for tier in store.tiers] == [0, 0, 5]
    store.release_leases("job", names)
    assert store.tiers[2].read_usage().leased == 0


@pytest.mark.proof
def test_what_is_slower_than_computing_is_not_read(store: KVStore) -> None:
    names = fill(store)
    store.tiers[0].remove_blocks([name.hash for name in names[2:]])
    store.set_compute_speed(lambda: 40.0)  # 100 ms a block
    store.cost.tier_speed("shared").record_read(1, 0.0)
    assert store.cost.tier_speed("disk").begin_probe()
    store.cost.tier_speed("disk").record_read(1, 1.0)
    assert read(store) == found(0)[:2]
    assert store.stats.not_worth == 3
    wanted = [ReadRequest(name, memoryview(bytearray(LAYOUT.payload_bytes))) for name in names]
    assert len(store.load_blocks(wanted, must_read=True)) == 5  # by who cannot compute them
    assert [bytes(one.target) for one in wanted] == expected()


def test_a_state_is_read_as_a_whole_or_not_at_all(store: KVStore) -> None:
    names = fill(store)
    wanted = [ReadRequest(name, memoryview(bytearray(LAYOUT.payload_bytes))) for name in names]
    store.set_compute_speed(lambda: 40.0)
    store.cost.tier_speed("shared").record_read(1, 1.0)  # five blocks take as long as 200 tokens
    assert not store.load_state(wanted, 100)
    assert store.stats.not_worth == 5
    assert store.load_state(wanted, 300)
    assert [bytes(one.target) for one in wanted] == expected()
    for tier in store.tiers:
        tier.remove_blocks([names[2].hash])
    assert not store.load_state(wanted, 300)


@pytest.mark.parametrize("depth", [0, 1])
def test_memory_is_read_though_its_reader_waits_for_a_processor(
    depth: int, store: KVStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of memory the processor time counts: the engine would wait as well. A disk that takes long is left alone."""
    names = fill(store)
    for tier in store.tiers[:depth]:
        tier.remove_blocks([name.hash for name in names])
    tier, get = store.tiers[depth], store.tiers[depth].get

    def get_late(wanted: Sequence[ReadRequest]) -> list[bool]:
        time.sleep(0.05)
        return get(wanted)

    monkeypatch.setattr(tier, "get", get_late)
    store.set_compute_speed(lambda: 1000.0)  # 4 ms a block
    for _ in range(3):
        num_read = len(read(store))
    assert num_read == (len(names) if tier.name == "shared" else 0)


@pytest.mark.proof
def test_without_its_server_a_store_lives_from_the_rest(make_store: MakeStore) -> None:
    store = make_store(url=f"redis://127.0.0.1:{find_free_port()}/0")
    fill(store)
    assert read(store) == found(0)
    assert store.tiers[2].counters.errors > 0
    alone = make_store(url=f"redis://127.0.0.1:{find_free_port()}/0", shared_mb=0, disk_mb=0)
    fill(alone)
    assert read(alone) == []
    alone.lease_blocks("job", names_of(alone))


def test_each_tier_has_as_many_mebibytes_as_its_setting_says(make_store: MakeStore) -> None:
    store = make_store(shared_mb=1, disk_mb=2, redis_mb=3)
    assert [tier.read_usage().budget for tier in store.tiers] == [2**20, 2 * 2**20, 3 * 2**20]


# What this host has room for.

HUGE_MB = 2**40
"""More than any file system has."""
IDLE_MB = 2**23
"""More than any has free, and what the arena of a former model is said to have, which has nothing."""
NOT_HERE = "none is no directory: PENSTOCK_KV_STORE_SHARED_DIR names another one"


@pytest.mark.parametrize(
    ("given", "refused", "told"),
    [
        ({"shared_mb": 1, "disk_mb": 1}, "", ""),
        ({"shared_mb": HUGE_MB}, "no room for .* lower PENSTOCK_KV_STORE_SHARED_MB; 0 turns", "shared memory"),
        ({"shared_mb": IDLE_MB}, "no room for .* lower PENSTOCK_KV_STORE_SHARED_MB; 0 turns", "shared memory"),
        ({"shared_mb": 1, "shared_dir": "{}/none"}, NOT_HERE, f"without shared memory: .*{NOT_HERE}"),
        ({"shared_mb": 0, "shared_dir": "{}/none", "disk_mb": 1}, NOT_HERE, f"without a disk tier: .*{NOT_HERE}"),
        ({"disk_mb": 1, "disk_dir": "{}/file/kv"}, "be written to: PENSTOCK_KV_STORE_DISK", "the KV store runs"),
        ({"disk_mb": 1, "disk_dir": "{}/used"}, "processes with another shared memory use", "the KV store runs"),
    ],
)  # fmt: skip
def test_tiers_are_looked_at_before_they_are_opened(
    given: dict[str, object], refused: str, told: str, tmp_path: Path
) -> None:
    """What was asked for and cannot be is refused, what nobody asked for is said. Looking changes nothing."""
    (tmp_path / "file").touch()
    (tmp_path / "memory").mkdir()
    with (tmp_path / "memory" / f"penstock-kv-{os.geteuid()}-0-demo").open("wb") as former:
        former.truncate(IDLE_MB * 2**20)
    (tmp_path / "elsewhere").mkdir()
    kept = {"shared_mb": 1, "shared_dir": str(tmp_path / "memory"), "disk_dir": str(tmp_path / "kv"), "redis_mb": 0}
    used = {"shared_mb": 0, "disk_mb": 1, "disk_dir": str(tmp_path / "used"), "shared_dir": str(tmp_path / "elsewhere")}
    others = KVStore.open(LAYOUT, KVSettings(**(kept | used)), "", "demo")
    filled = {name: value.format(tmp_path) if isinstance(value, str) else value for name, value in given.items()}
    asked = KVSettings(**(kept | filled))
    for settings, is_asked in ((asked, True), (asked.model_construct(_fields_set=set(), **dict(asked)), False)):
        before = sorted(tmp_path.rglob("*"))
        found = fit_tiers(settings, "demo")
        assert sorted(tmp_path.rglob("*")) == before
        is_refused = bool(refused) and (is_asked or not told)
        assert (len(found.refused), len(found.told)) == (int(is_refused), int(bool(told) and not is_asked))
        assert re.search(refused if is_refused else "" if is_asked else told, "".join(found.refused + found.told))
        if not is_refused:
            in_memory, on_disk = min(1, found.settings.shared_mb), found.settings.disk_mb
            store = KVStore.open(LAYOUT, found.settings.model_copy(update={"shared_mb": in_memory}), "", "demo")
            assert len(store.tiers) == bool(in_memory) + bool(on_disk)
            store.close()
    others.close()


def test_shared_memory_that_holds_no_block_is_left_out_if_nobody_asked_for_it(
    settings: KVSettings, caplog: pytest.LogCaptureFixture
) -> None:
    layout = replace(LAYOUT, payload_bytes=2**21)
    for given in ({"shared_mb", "disk_mb"}, {"disk_mb"}):
        wanted = settings.model_construct(_fields_set=given, **{**dict(settings), "disk_mb": 8, "redis_mb": 0})
        if "shared_mb" in given:
            with pytest.raises(KVStoreError, match="do not hold one KV block"):
                KVStore.open(layout, wanted, "", "demo")
        else:
            store = KVStore.open(layout, wanted, "", "demo")
            assert [tier.name for tier in store.tiers] == ["disk"]
            store.close()
    assert "the KV store runs without shared memory: PENSTOCK_KV_STORE_SHARED_MB" in caplog.text
