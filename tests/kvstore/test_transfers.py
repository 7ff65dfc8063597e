"""Transfers: what is fetched lands, what is lent comes back, whatever happens in the threads."""

import contextlib
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from penstock.config.settings import KVSettings
from penstock.kvstore.block import BlockKey
from penstock.kvstore.store import KVStore
from penstock.kvstore.transfers import LoadOperation, StoreOperation, Transfers
from sim.waiting import PATIENCE_S, wait_for
from tests.kvstore.test_store import LAYOUT, expected, fill, names_of, read


class FakePinnedBlock:
    def __init__(self, payload: bytes) -> None:
        self.payload = memoryview(payload)
        self.valid = True

    def is_valid(self) -> bool:
        return self.valid


class FakeStagedBlocks:
    def __init__(self, held: int, num_views: int) -> None:
        self.num_cached = held
        self.views = [memoryview(bytearray(LAYOUT.payload_bytes)) for _ in range(num_views)]


class Pool:
    """Lends the blocks of one prompt, and counts what comes back."""

    def __init__(self, held: int = 0, room: int = 99) -> None:
        self.held, self.room = held, room
        self.landed: list[list[bytes]] = []
        self.lent: list[FakePinnedBlock] = []
        self.returned: list[FakePinnedBlock] = []
        self.valid = True
        self.is_full = False

    def stage_blocks(self, keys: list[bytes], priority_class: str) -> FakeStagedBlocks | None:
        if self.is_full:
            return None
        held = min(self.held, len(keys))
        return FakeStagedBlocks(held, min(self.room, len(keys) - held))

    def commit_staged_blocks(self, landing: Any, num_filled: int) -> None:
        assert threading.current_thread() is threading.main_thread()
        self.landed.append([bytes(view) for view in landing.views[:num_filled]])

    def pin_blocks(self, seq: Any, indices: Sequence[int]) -> list[FakePinnedBlock]:
        lent = [FakePinnedBlock(expected()[index]) for index in indices]
        for one in lent:
            one.valid = self.valid
        self.lent += lent
        return lent

    def unpin_block(self, lent: Any) -> None:
        assert threading.current_thread() is threading.main_thread()
        self.returned.append(lent)


@pytest.fixture
def store(tmp_path: Path, exits: contextlib.ExitStack) -> KVStore:
    settings = KVSettings(shared_mb=1, shared_dir=str(tmp_path), disk_mb=1, disk_dir=str(tmp_path / "d"), redis_mb=0)
    return exits.enter_context(contextlib.closing(KVStore.open(LAYOUT, settings, "", "demo")))


def collected(transfers: Transfers, count: int = 1) -> list[LoadOperation | StoreOperation]:
    done: list[LoadOperation | StoreOperation] = []

    def enough() -> bool:
        done.extend(transfers.collect_finished())
        return len(done) >= count

    wait_for(enough, "the transfers")
    assert len(transfers) == 0
    return done


def all_back(transfers: Transfers, pool: Pool) -> None:
    def done() -> bool:
        list(transfers.collect_finished())
        return len(pool.returned) == len(pool.lent)

    wait_for(done, "all is given back")
    assert set(pool.returned) == set(pool.lent)


@pytest.fixture
def begin(store: KVStore, exits: contextlib.ExitStack) -> Callable[..., Transfers]:
    """Begins transfers between a pool and the store: `begin(pool, 10)`. They are closed at the end."""
    return lambda pool, limit=10: exits.enter_context(contextlib.closing(Transfers(store, pool, limit)))


Begin = Callable[..., Transfers]


def load(transfers: Transfers, *given: Any) -> LoadOperation:
    """Load, and return the operation when it is done."""
    transfers.submit_load(LoadOperation("mine", *given))
    (done,) = collected(transfers)
    assert isinstance(done, LoadOperation)
    return done


def store_all(transfers: Transfers, store: KVStore, owner: str = "", names: Sequence[BlockKey] = ()) -> StoreOperation:
    """Submit the blocks of a prompt as one operation, for a job or for none."""
    blocks = [(i, name, store.all_tiers) for i, name in enumerate(names or names_of(store))]
    transfers.submit_store("seq", operation := StoreOperation("mine", blocks, owner))
    return operation


def test_what_the_tiers_have_lands(store: KVStore, begin: Begin) -> None:
    names, pool = fill(store, 0b11), Pool(held=1)
    done = load(begin(pool), names[:4], names[4], 4)
    assert (done.context, done.num_pool_blocks, done.missing_tiers) == ("mine", 1, [0, 0, 0, 0])
    assert pool.landed == [expected()[1:4]]
    assert done.tail_payload is not None
    assert bytes(done.tail_payload) == expected()[4]
    assert (store.stats.pool_hits, store.stats.pool_misses) == (1, 3)


def test_what_is_nowhere_is_known_at_once(store: KVStore, begin: Begin) -> None:
    transfers = begin(Pool())
    transfers.submit_load(LoadOperation("mine", names_of(store)[:4]))
    (done,) = transfers.collect_finished()  # no thread is waited for
    assert isinstance(done, LoadOperation)
    assert done.missing_tiers == []
    assert [tier.counters.misses for tier in store.tiers] == [4, 4]


def test_a_tail_without_its_blocks_is_not_read(store: KVStore, begin: Begin) -> None:
    names, pool = fill(store, 0b11), Pool(room=2)
    assert load(begin(pool), names[:4], names[4], 4).tail_payload is None
    assert pool.landed == [expected()[:2]]


def test_what_the_tiers_lack_is_said(store: KVStore, begin: Begin) -> None:
    names = fill(store, 0b10)
    store.tiers[1].remove_blocks([names[0].hash])
    assert load(begin(Pool(held=3)), names[:4]).missing_tiers == [0b11, 0b01, 0b01, 0b01]


def test_shipped_blocks_can_be_read_and_go_behind(store: KVStore, begin: Begin) -> None:
    transfers = begin(pool := Pool())
    ship = store_all(transfers, store, "job")
    assert collected(transfers) == [ship]
    assert ship.is_written.result() == ship.finished_s
    assert [payload for payload, _ in read(store)] == expected()
    assert store.tiers[0].read_usage().leased == 5
    all_back(transfers, pool)
    assert store.tiers[1].read_usage().blocks == 5
    transfers.submit_release("job", names_of(store))
    transfers.close()
    assert store.tiers[0].read_usage().leased == 0


def test_what_would_take_up_too_much_of_the_pool_is_not_written_behind(store: KVStore, begin: Begin) -> None:
    transfers = begin(pool := Pool(), 4)
    store_all(transfers, store, "job")
    collected(transfers)
    all_back(transfers, pool)
    transfers.close()
    assert [tier.read_usage().blocks for tier in store.tiers] == [5, 0]
    assert store.stats.not_written == 5


def test_what_no_job_waits_for_takes_up_so_much_of_the_pool_at_most(
    store: KVStore, begin: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    names, pool, gate = names_of(store), Pool(), threading.Event()
    held_up(store, "store_blocks", gate, monkeypatch)
    transfers = begin(pool, 3)
    for i, name in enumerate(names):
        transfers.submit_store("seq", StoreOperation(i, [(i, name, store.all_tiers)]))
    assert len(pool.lent) == 3
    assert store.stats.not_written == 2
    gate.set()
    assert {one.context for one in collected(transfers, 5)} == set(range(5))
    all_back(transfers, pool)
    transfers.submit_store("seq", StoreOperation("again", [(3, names[3], store.all_tiers)]))
    collected(transfers)
    all_back(transfers, pool)
    transfers.close()
    assert [tier.read_usage().blocks for tier in store.tiers] == [4, 4]


def held_up(store: KVStore, method: str, gate: threading.Event, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Have a method of the store wait for the gate; the event returned says that it does."""
    call, waits = getattr(store, method), threading.Event()

    def waiting(*args: Any, **more: Any) -> Any:
        waits.set()
        assert gate.wait(PATIENCE_S)
        return call(*args, **more)

    monkeypatch.setattr(store, method, waiting)
    return waits


def test_interactive_before_batch_and_what_needs_nothing_at_once(
    store: KVStore, begin: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    names, gate = fill(store, 0b11), threading.Event()
    begun = held_up(store, "load_blocks", gate, monkeypatch)
    transfers = begin(Pool())
    transfers.submit_load(LoadOperation("first", names[:4], priority_class="batch"))
    assert begun.wait(PATIENCE_S)
    transfers.submit_load(LoadOperation("batch", names[:4], priority_class="batch"))
    transfers.submit_load(LoadOperation("interactive", names[:4]))
    transfers.submit_load(LoadOperation("nothing", []))
    assert [one.context for one in transfers.collect_finished()] == ["nothing"]
    gate.set()
    assert [one.context for one in collected(transfers, 3)] == ["first", "interactive", "batch"]


def test_a_fetch_without_room_waits_and_those_behind_it(store: KVStore, begin: Begin) -> None:
    names, pool = fill(store, 0b11), Pool(room=0)
    pool.is_full = True
    transfers = begin(pool)
    transfers.submit_load(LoadOperation("batch", names[:2], priority_class="batch"))
    transfers.submit_load(LoadOperation("one", names[:4]))
    transfers.submit_load(LoadOperation("two", names[:1]))
    assert list(transfers.collect_finished()) == []
    pool.is_full, pool.room = False, 99
    assert [one.context for one in collected(transfers, 3)] == ["one", "two", "batch"]
    assert pool.landed == [expected()[:4], expected()[:1], expected()[:2]]


def test_closing_drops_what_no_job_waits_for(store: KVStore, begin: Begin, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that the pool lent comes back, and every landing is closed."""
    names, pool, gate = names_of(store), Pool(held=1), threading.Event()
    writes = held_up(store, "store_blocks", gate, monkeypatch)
    reads = held_up(store, "load_blocks", gate, monkeypatch)
    transfers = begin(pool)
    ship = store_all(transfers, store, "job", names[:1])
    transfers.submit_store("seq", StoreOperation("answer", [(1, names[1], store.all_tiers)]))
    transfers.submit_load(LoadOperation("one", names[:4]))
    transfers.submit_load(LoadOperation("two", names[:4]))
    assert writes.wait(PATIENCE_S)
    assert reads.wait(PATIENCE_S)

    def open_gate() -> None:
        wait_for(lambda: transfers._is_closing, "it is being closed")
        gate.set()

    opening = threading.Thread(target=open_gate)
    opening.start()
    transfers.close()
    opening.join()
    assert ship.is_written.done()
    assert set(pool.returned) == set(pool.lent)
    assert len(pool.landed) == 2
    assert store.find_tiers([name.hash for name in names[:2]]) == [0, 2]


def test_a_block_that_was_recycled_under_its_reader_is_not_stored(store: KVStore, begin: Begin) -> None:
    pool = Pool()
    pool.valid = False
    transfers = begin(pool)
    store_all(transfers, store, names=names_of(store)[:1])
    collected(transfers)
    all_back(transfers, pool)
    transfers.close()
    assert read(store) == []


def test_a_failure_in_a_thread_loses_nothing(store: KVStore, begin: Begin, monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker goes on as if the store had been empty."""

    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("a bug")

    names, pool = names_of(store), Pool(held=2)
    transfers = begin(pool)
    monkeypatch.setattr(store, "load_blocks", broken)
    monkeypatch.setattr(store, "store_blocks", broken)
    transfers.submit_load(LoadOperation("one", names[:4]))
    store_all(transfers, store, names=names[:1])
    done = {one.context: one for one in collected(transfers, 2)}
    assert isinstance(done["one"], LoadOperation)
    assert done["one"].missing_tiers == []
    assert pool.landed == [[]]
    all_back(transfers, pool)
    monkeypatch.undo()
    assert load(transfers, names[:4]).context == "mine"
