"""The commands as a user runs them: as processes, against real servers."""

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.local.processes import free_port, start_child, wait_until
from penstock.local.stack import Stack
from penstock.names import Pipeline
from penstock.settings import Addresses
from penstock.status import worker_status
from tests.commands import HERE, Terminal, penstock
from tests.forked import ForkedStack, fork, run_penstock


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with ForkedStack(tmp_path_factory.mktemp("cli")) as made:
        made.wait_ready(120)
        yield made


@pytest.fixture
def url(stack: Stack) -> str:
    return stack.addresses.stream_url


def run_worker(directory: Path, stage: str, **settings: str) -> tuple[int, str]:
    """How a worker ends that cannot start, and what it prints."""
    worker = fork("worker", directory / "log", run_penstock, "worker", stage, environment={**os.environ, **settings})
    return worker.wait(60), worker.tail(1000)


def test_an_unknown_setting_names_the_nearest() -> None:
    done = penstock("doctor", PENSTOCK_PIPELIN="x")
    assert done.returncode == 1
    assert "PENSTOCK_PIPELIN is not a setting; the nearest is PENSTOCK_PIPELINE" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_bad_setting_is_named(tmp_path: Path) -> None:
    code, printed = run_worker(tmp_path, "prefill", PENSTOCK_RECORD_LEASE_S="soon")
    assert code == 1
    assert "PENSTOCK_RECORD_LEASE_S" in printed
    assert "Traceback" not in printed


def test_doctor_says_what_to_do_where_nothing_runs(terminal: Terminal) -> None:
    done = terminal("doctor")
    assert done.returncode == 1
    assert "penstock up" in done.stdout


def test_doctor_is_content_with_a_running_pipeline(url: str) -> None:
    done = penstock("doctor", PENSTOCK_STREAM_URL=url)
    assert done.returncode == 0, done.stdout
    assert "1 ready of 1" in done.stdout


def test_doctor_finds_a_missing_topic(terminal: Terminal, redis_url: str, pipeline: Pipeline) -> None:
    missing = terminal("doctor", PENSTOCK_STREAM_URL=redis_url, PENSTOCK_PIPELINE=pipeline.name)
    assert "penstock topics create" in missing.stdout
    made = terminal("topics", "create", PENSTOCK_STREAM_URL=redis_url, PENSTOCK_PIPELINE=pipeline.name)
    assert all(f"made {topic}" in made.stdout for topic in pipeline.topics())
    again = terminal("topics", "create", PENSTOCK_STREAM_URL=redis_url, PENSTOCK_PIPELINE=pipeline.name)
    assert "all topics exist" in again.stdout


def test_generate_joins_and_resumes(terminal: Terminal, url: str) -> None:
    first = penstock("generate", "In the beginning", "--max-tokens", "12", "--id", "one", PENSTOCK_STREAM_URL=url)
    assert first.returncode == 0, first.stderr
    assert "12 tokens, first after" in first.stderr
    again = terminal("generate", "In the beginning", "--max-tokens", "12", "--id", "one", PENSTOCK_STREAM_URL=url)
    assert again.stdout == first.stdout
    other = terminal("generate", "And God said", "--id", "one", PENSTOCK_STREAM_URL=url)
    assert other.returncode == 1
    assert "id_conflict" in other.stderr


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["generate", ""], "invalid_request"),
        (["generate", "x", "--max-tokens", "0"], "invalid_request"),
        (["generate", "x", "--max-tokens", "100000"], "prompt_too_long"),
        (["generate", "x", "--temperature", "nan"], "invalid_request"),
    ],
)
def test_a_bad_request_is_one_line(terminal: Terminal, url: str, arguments: list[str], code: str) -> None:
    done = terminal(*arguments, PENSTOCK_STREAM_URL=url)
    assert done.returncode == 1
    assert code in done.stderr


def test_a_model_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    code, printed = run_worker(tmp_path, "decode", PENSTOCK_ENGINE_MODEL=str(tmp_path / "nowhere"))
    assert code == 1
    assert "nowhere" in printed
    assert "Traceback" not in printed


def test_up_serves_until_interrupted(tmp_path: Path) -> None:
    port = free_port()
    log = tmp_path / "up.log"
    command = [sys.executable, "-m", "penstock.cli.main", "up", "--port", str(port), "--data", str(tmp_path / "data")]
    command += ["--gateway-port", str(free_port())]
    child = start_child(command, name="up", log=log, directory=HERE)
    addresses = Addresses(stream_url=f"redis://127.0.0.1:{port}/0")
    wait_until(lambda: log.exists() and "Penstock is up" in log.read_text(), 120, "penstock up", every_s=0.1)
    assert {status["state"] for status in worker_status(addresses)} == {"ready"}
    done = penstock("generate", "In the beginning", "--max-tokens", "4", PENSTOCK_STREAM_URL=addresses.stream_url)
    assert done.returncode == 0
    child.send(signal.SIGINT)
    assert child.wait(60) == 0


def test_up_that_is_ended_before_it_is_ready_stops_in_order(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    command = [sys.executable, "-m", "penstock.cli.main", "up", "--port", str(free_port()), "--data", str(tmp_path)]
    command += ["--gateway-port", str(free_port())]
    environment = {**os.environ, "PENSTOCK_KV_STORE_SHARED_DIR": str(shared), "PENSTOCK_KV_STORE_DISK_MB": "0"}
    child = start_child(command, name="up", log=tmp_path / "up.log", environment=environment, directory=HERE)
    wait_until((tmp_path / "prefill-0.log").exists, 60, "the first worker was started")
    child.send(signal.SIGTERM)
    assert child.wait(60) == 0, child.tail()
    assert "Penstock is up" not in child.tail()
    assert "stopping" in child.tail()
    assert not list(shared.iterdir())
