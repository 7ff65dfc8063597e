"""What a worker chooses by its machine and its model, where the settings leave it open."""

from pathlib import Path

import pytest
import torch

from penstock.config.settings import EngineSettings
from penstock.cores import count_usable_cores, list_usable_cores
from penstock.engine import memory
from penstock.engine.memory import MIN_POOL_MB, NUM_CONVERSATIONS, choose_pool
from penstock.engine.storage import BlockLayout, LayerShape

LAYOUT = BlockLayout((LayerShape(0, (8, 128), (8, 128)),), 16, torch.float32)
"""8 KiB for a token."""
CPU, OPEN = torch.device("cpu"), EngineSettings(pool_mb=0)


@pytest.mark.proof
@pytest.mark.parametrize(
    ("context_length", "available_mb", "cores", "pool_mb"),
    [
        pytest.param(32_768, 64_000, 4, NUM_CONVERSATIONS * 256, id="eight sequences of the model's context"),
        pytest.param(32_760, None, 4, NUM_CONVERSATIONS * 256, id="whole blocks, and memory that is not known"),
        pytest.param(512, 64_000, 4, MIN_POOL_MB, id="a short context"),
        pytest.param(32_768, 4_000, 4, 1_000, id="a quarter of the memory"),
        pytest.param(32_768, 4_000, 1, 250, id="a quarter of the share of one core of four"),
        pytest.param(32_768, 1, 1, 1, id="hardly any memory"),
    ],
)
def test_a_pool_has_room_for_eight_sequences_within_a_share_of_the_memory(
    context_length: int, available_mb: int | None, cores: int, pool_mb: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "count_available_bytes", lambda: available_mb and available_mb * 2**20)
    monkeypatch.setattr(memory, "count_usable_cores", lambda: cores)
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    assert choose_pool(LAYOUT, context_length, OPEN, CPU).pool_mb == pool_mb


def test_a_pool_that_is_set_stays() -> None:
    assert choose_pool(LAYOUT, 10**6, EngineSettings(pool_mb=3), CPU).pool_mb == 3


@pytest.mark.parametrize(
    ("quota", "count"), [("max 100000", 6), ("250000 100000", 3), ("10000 100000", 1), ("900000 100000", 6), ("", 6)]
)
def test_threads_are_as_many_as_cores_within_the_quota_of_a_container(
    quota: str, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {2, 3, 4, 5, 6, 7})
    (tmp_path / "cpu.max").write_text(quota)
    assert count_usable_cores(tmp_path / "cpu.max") == count
    assert count_usable_cores(tmp_path / "none") == len(list_usable_cores()) == 6
    assert EngineSettings(threads=5).num_threads == 5
    assert EngineSettings(threads=0).num_threads >= 1
