"""What a worker chooses by its machine and its model, where the settings leave it open."""

from pathlib import Path

import pytest
import torch

from penstock.config.settings import EngineSettings
from penstock.cores import count_usable_cores, list_usable_cores
from penstock.engine.memory.memory import MIN_POOL_MB, NUM_CONVERSATIONS, choose_pool
from penstock.engine.memory.storage import BlockLayout, LayerShape
from tests.draws import mark_some

LAYOUT = BlockLayout((LayerShape(0, (8, 128), (8, 128)),), 16, torch.float32)
"""8 KiB for a token."""
CPU, OPEN = torch.device("cpu"), EngineSettings(pool_mb=0)


def write_system(root: Path, files: dict[str, str]) -> None:
    """Write what the system says of its memory and of this process's control groups."""
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content)


def limit_memory(group: str, mb: int) -> dict[str, str]:
    """The files of a control group, of the second version, that may have so much memory and has nothing yet."""
    folder = f"sys/fs/cgroup/{group}"
    return {f"{folder}memory.max": str(mb * 2**20), f"{folder}memory.current": "0", f"{folder}memory.stat": ""}


POD = {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "200000 100000\n", **limit_memory("", 16_000)}
UNIT = {"proc/self/cgroup": "0::/all/one\n", "sys/fs/cgroup/all/one/cpu.max": "200000 100000\n"}


@pytest.mark.parametrize(
    ("context_length", "available_mb", "usable", "groups", "pool_mb"),
    mark_some([
        pytest.param(32_768, 64_000, 4, {}, NUM_CONVERSATIONS * 256, id="eight sequences of the model's context"),
        pytest.param(32_760, None, 4, {}, NUM_CONVERSATIONS * 256, id="whole blocks, and memory that is not known"),
        pytest.param(512, 64_000, 4, {}, MIN_POOL_MB, id="a short context"),
        pytest.param(32_768, 4_000, 4, {}, 1_000, id="a quarter of the memory"),
        pytest.param(32_768, 4_000, 1, {}, 250, id="a quarter of the share of one core of four"),
        pytest.param(32_768, 1, 1, {}, 1, id="hardly any memory"),
        pytest.param(10**6, 64_000, 4, POD, 4_000, id="a container of two cores has its memory for these two"),
        pytest.param(10**6, 64_000, 1, POD, 2_000, id="a worker on one of a container's two cores"),
        pytest.param(
            10**6, 64_000, 2,
            {**limit_memory("", 16_000), "proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpuset.cpus.effective": "0,2\n"},
            4_000, id="a container that has certain cores",
        ),
        pytest.param(10**6, 64_000, 4, UNIT, 8_000, id="the machine's memory is shared with its other cores"),
        pytest.param(
            10**6, 64_000, 4, UNIT | limit_memory("all/", 16_000), 2_000,
            id="the memory is that of a group around the one of two cores",
        ),
        pytest.param(
            10**6, 64_000, 2,
            {"proc/self/cgroup": "4:cpu,cpuacct:/docker/1\n3:memory:/docker/1\n2:cpuset:/docker/1\n",
             "sys/fs/cgroup/memory/memory.limit_in_bytes": str(16_000 * 2**20),
             "sys/fs/cgroup/memory/memory.usage_in_bytes": "0", "sys/fs/cgroup/memory/memory.stat": "",
             "sys/fs/cgroup/cpuset/cpuset.effective_cpus": "1-2\n"},
            4_000, id="a container by the first version of control groups",
        ),
    ], pytest.mark.proof, 2),
)  # fmt: skip
def test_a_pool_has_room_for_eight_sequences_within_a_share_of_the_memory(
    context_length: int, available_mb: int | None, usable: int, groups: dict[str, str], pool_mb: int, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {*range(usable)})
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    known = {} if available_mb is None else {
        "proc/meminfo": f"MemTotal: {64_000 * 2**10} kB\nMemAvailable: {available_mb * 2**10} kB\n"
    }  # fmt: skip
    write_system(tmp_path, known | groups)
    assert choose_pool(LAYOUT, context_length, OPEN, CPU, tmp_path).pool_mb == pool_mb


def test_a_pool_that_is_set_stays() -> None:
    assert choose_pool(LAYOUT, 10**6, EngineSettings(pool_mb=3), CPU).pool_mb == 3


FIRST_QUOTA, FIRST_PERIOD = (f"sys/fs/cgroup/cpu/{{}}cpu.cfs_{name}_us" for name in ("quota", "period"))


@pytest.mark.parametrize(
    ("files", "count"),
    [
        ({}, 6),
        *(({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": quota}, count) for quota, count in (
            ("max 100000", 6), ("250000 100000", 2), ("399000 100000", 3), ("10000 100000", 1), ("900000 100000", 6),
            ("", 6),
        )),
        ({"proc/self/cgroup": "0::/system.slice/penstock.service\n",
          "sys/fs/cgroup/system.slice/penstock.service/cpu.max": "200000 100000"}, 2),
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/b/cpu.max": "400000 100000",
          "sys/fs/cgroup/a/cpu.max": "300000 100000", "sys/fs/cgroup/cpu.max": "max 100000"}, 3),
        ({"proc/self/cgroup": "9:cpu,cpuacct:/docker/1\n0::/\n", FIRST_QUOTA.format(""): "200000",
          FIRST_PERIOD.format(""): "100000"}, 2),
        ({"proc/self/cgroup": "9:cpu:/a/b\n", FIRST_QUOTA.format("a/b/"): "-1", FIRST_PERIOD.format("a/b/"): "100000",
          FIRST_QUOTA.format("a/"): "150000", FIRST_PERIOD.format("a/"): "50000"}, 3),
    ],
)  # fmt: skip
def test_threads_are_as_many_as_whole_cores_within_the_tightest_quota(
    files: dict[str, str], count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {2, 3, 4, 5, 6, 7})
    write_system(tmp_path, files)
    assert count_usable_cores(tmp_path) == count
    assert len(list_usable_cores()) == 6
    assert EngineSettings(threads=5).num_threads == 5
    assert EngineSettings(threads=0).num_threads >= 1
