"""KV blocks and a disk that is full. In a file of its own: space that slots already have stays theirs on a full disk,
so no other test may have written blocks with the same workers.
"""

import contextlib
import itertools
from pathlib import Path

import pytest

from penstock import failpoints
from penstock.kvstore.tiers.host import HostTier
from sim.chaos.disk import SmallDisk, simulate_full_disk
from sim.chaos.system import ChaosStack
from sim.waiting import wait_for
from tests.chaos.quiet import ask
from tests.kvstore.blocks import make_form, new_names, put


def test_a_full_disk_takes_no_block_and_does_no_harm(stack: ChaosStack) -> None:
    disk = stack.disk
    disk.fill_up()
    answer = ask(stack, 1)
    assert ask(stack, 2)
    assert ask(stack, 1) == answer
    assert disk.count_blocks() == 0
    disk.free_space()

    others = itertools.count(10)
    wait_for(lambda: ask(stack, next(others)) and disk.count_blocks() > 0, "blocks are on the disk again")


def test_where_nothing_can_be_mounted_the_write_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failpoints, "_armed", {})
    disk, form = SmallDisk(tmp_path), make_form("a model")
    disk.is_real = False
    simulate_full_disk(str(disk.path))
    disk.fill_up()
    with contextlib.closing(HostTier.open_disk(form, disk.path / "blocks", 2**20, str(tmp_path))) as tier:
        assert put(tier, new_names(1), form) == [False]
        assert tier.counters.errors == 1
    disk.free_space()
    with contextlib.closing(HostTier.open_disk(form, disk.path / "blocks", 2**20, str(tmp_path))) as tier:
        assert put(tier, new_names(1), form) == [True]
