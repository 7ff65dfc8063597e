"""What a container has, and what a process of ours does in it."""

import sys
from pathlib import Path

import pytest

from sim.container import SHARED_MEMORY, Container, ask_penstock_up
from sim.waiting import PATIENCE_S
from tests.docker.files import compose

HARD = Container(is_read_only=True, host_name="Odd_näme.of-a host", user=12345, max_files=1024)
"""Docker's shared memory, and all that a pod may be denied. Its image names all addresses, its company a proxy."""
HARD_SETTINGS = {
    "PENSTOCK_GATEWAY_HOST": "0.0.0.0", "PENSTOCK_GATEWAY_KEYS": "open",
    **dict.fromkeys(("http_proxy", "https_proxy", "all_proxy"), "http://127.0.0.1:9"), "no_proxy": "", "NO_PROXY": "",
}  # fmt: skip


NO_ROOM = "shared memory for KV blocks: no room for 256 MB in /dev/shm (64 MB are free): give it more (in a container "


@pytest.fixture(autouse=True)
def _skip_without_namespaces() -> None:
    if problem := HARD.find_problem():
        pytest.skip(problem)


def test_with_the_least_that_a_container_has_a_pipeline_answers(tmp_path: Path) -> None:
    assert ask_penstock_up(HARD, tmp_path, HARD_SETTINGS, PATIENCE_S)
    told = (tmp_path / "log").read_text()
    assert "shared memory for KV blocks: 32 MB, not 256: /dev/shm has 64" in told
    assert "gateway: ready" in told


def test_with_the_settings_and_limits_of_the_compose_file_a_pipeline_answers(tmp_path: Path) -> None:
    """Kafka and Redis are those of `penstock up`."""
    whole = compose()
    given = {name: str(value) for name, value in whole["services"]["auto"]["environment"].items()}
    settings = {name: value for name, value in given.items() if name.startswith(("PENSTOCK_KV_STORE", "PENSTOCK_ENG"))}
    limits = dict(part.split("=") for part in whole["volumes"]["shm"]["driver_opts"]["o"].split(","))
    memory = tmp_path / "shm"
    memory.mkdir()
    container = Container({SHARED_MEMORY: "64m", memory: limits["size"]}, user=10001)
    assert ask_penstock_up(container, tmp_path, settings | {"PENSTOCK_KV_STORE_SHARED_DIR": str(memory)}, PATIENCE_S)
    assert "shared memory" not in (tmp_path / "log").read_text()


@pytest.mark.parametrize(
    ("arguments", "sizes", "settings", "said"),
    [
        (("up", "--data"), {SHARED_MEMORY: "64m"}, {"PENSTOCK_KV_STORE_SHARED_MB": "256"}, NO_ROOM),
        (("worker", "auto"), {SHARED_MEMORY: "64m"}, {"PENSTOCK_KV_STORE_SHARED_MB": "256"}, NO_ROOM),
        (("worker", "auto"), {}, {"PENSTOCK_KV_STORE_SHARED_DIR": "{}"}, "blocks: no room for 1 MB in "),
        (("up", "--data"), {}, {}, "for data and logs: fewer than 16 MB are free there: make room, or choose another"),
    ],
    ids=["shared memory of up", "shared memory of a worker", "a directory for it", "a full disk"],
)  # fmt: skip
def test_what_cannot_be_is_said_in_one_line_before_anything_is_started(
    arguments: tuple[str, ...], sizes: dict[Path, str], settings: dict[str, str], said: str, tmp_path: Path
) -> None:
    data = tmp_path / "data"
    data.mkdir()
    container = Container(sizes or {data: "1m"})
    words = [*arguments, *([str(data)] if arguments[-1] == "--data" else [])]
    given = {name: value.format(data) for name, value in settings.items()}
    child = container.start_command(tmp_path, [sys.executable, "-m", "penstock.cli.main", *words], given)
    assert child.wait(PATIENCE_S) == 1
    (line,) = (tmp_path / "log").read_text().splitlines()
    assert line.startswith("penstock: ")
    assert said in line
