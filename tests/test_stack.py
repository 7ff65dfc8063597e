"""The embedded stack without its workers, quick to start, and the processes that it starts."""

import fcntl
import json
import math
import os
import shlex
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import redis

from penstock.cli.error_lines import format_address
from penstock.cli.up import format_curl_command
from penstock.client import Client
from penstock.cores import list_usable_cores
from penstock.engine.weights.files import DEMO_MODEL
from penstock.errors import ModelLoadError, PenstockError
from penstock.ingest.http.server import open_listener
from penstock.local import memory
from penstock.local import stack as stack_module
from penstock.local.processes import find_free_port, start_child
from penstock.local.stack import SHARED_DIR_VARIABLE, Stack, WorkerSlot, split_cores
from penstock.names import Pipeline
from penstock.ops.status import read_worker_status
from penstock.own_servers import describe_port_problem, find_own_url
from penstock.worker.heartbeat import Heartbeat
from sim.forked import ForkedStack
from sim.waiting import PATIENCE_S, wait_for

OWNER = """
import sys, time
from pathlib import Path
from penstock.local import memory
from penstock.local import stack as stack_module
memory.SHARED_MEMORY_DIRECTORY = Path(sys.argv[1])
memory_of_a_stack = memory.StackMemory()
(memory_of_a_stack.path / "arena").touch()
time.sleep(600)
"""


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The place of shared memory."""
    monkeypatch.delenv(SHARED_DIR_VARIABLE, raising=False)
    monkeypatch.setattr(memory, "SHARED_MEMORY_DIRECTORY", tmp_path / "shm")
    memory.SHARED_MEMORY_DIRECTORY.mkdir()
    return memory.SHARED_MEMORY_DIRECTORY


def a_stack(directory: Path, redis_url: str, pipeline: Pipeline) -> Stack:
    return Stack(directory, pipeline=pipeline.name, redis=redis_url, prefill=0, decode=0)


def test_a_stack_without_workers_is_ready_at_once(
    shared: Path, tmp_path: Path, redis_url: str, pipeline: Pipeline
) -> None:
    with a_stack(tmp_path, redis_url, pipeline) as stack:
        stack.wait_until_ready(PATIENCE_S)
        stack.restart_dead()
        assert len(list(shared.iterdir())) == 1
    assert not list(shared.iterdir())
    assert split_cores(0) == []


def test_workers_share_the_cores_of_a_quota(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stack_module, "list_usable_cores", lambda: list(range(64)))
    monkeypatch.setattr(stack_module, "count_usable_cores", lambda: 4)
    assert split_cores(4) == [[0], [16], [32], [48]]
    assert split_cores(2) == [[0, 16], [32, 48]]


@pytest.mark.parametrize("host", ["127.0.0.2", "0.0.0.0", "::1"])
def test_a_gateway_is_found_ready_wherever_it_listens_and_no_proxy_is_asked_for_it(
    host: str, tmp_path: Path, redis_url: str, pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also by the health check of the image."""
    if ":" in host and not Path("/proc/net/if_inet6").exists():
        pytest.skip("no IPv6")
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    port = find_free_port()
    ports = {"PENSTOCK_GATEWAY_PORT": str(port), "PENSTOCK_TELEMETRY_PORT": str(find_free_port())}
    for name, value in {"PENSTOCK_GATEWAY_HOST": host, "PENSTOCK_GATEWAY_KEYS": "open", **ports}.items():
        monkeypatch.setenv(name, value)
    stack = Stack(tmp_path, pipeline=pipeline.name, redis=redis_url, prefill=0, decode=0, gateway=port)
    with stack:
        stack.wait_until_ready(PATIENCE_S)
        healthy = [sys.executable, str(Path(__file__).parents[1] / "docker/healthy")]
        assert subprocess.run(healthy, check=False).returncode == 0
        command = format_curl_command(stack.gateway_url)
        assert f"curl -N --noproxy '*' {shlex.quote(f'{stack.gateway_url}/v1/completions')} -d " in command
    assert subprocess.run(healthy, check=False).returncode == 1


def test_a_port_that_a_client_has_connected_with_itself_is_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    """As it happens to clients that connect again and again while a gateway is started anew."""
    port = find_free_port()
    with ThreadPoolExecutor() as pool:
        with socket.socket() as client:
            client.bind(("127.0.0.1", port))
            client.connect(("127.0.0.1", port))
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # no TIME_WAIT
            assert describe_port_problem("127.0.0.1", port) == "is taken by a connection that goes out from it"
            opened = pool.submit(open_listener, "127.0.0.1", port)
            wait_for(lambda: f"port {port} is taken though nobody listens on it" in caplog.text, "it is said")
            assert not opened.done()
        with opened.result() as listener:
            assert listener.getsockname()[1] == port
            assert describe_port_problem("127.0.0.1", port) == "is taken"
            with pytest.raises(PenstockError, match=f"cannot listen on 127.0.0.1:{port}"):
                open_listener("127.0.0.1", port)
    assert caplog.text.count("nobody listens") == 1


def test_a_stack_whose_server_waits_for_its_port_can_be_stopped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Both when it is started, and when it is started again."""
    asked, port = threading.Event(), find_free_port()
    stack = Stack(tmp_path, port=port, prefill=0, decode=0)
    stack.stop_asked = asked.is_set
    with ThreadPoolExecutor() as pool, socket.socket() as client:
        client.bind(("127.0.0.1", port))
        client.connect(("127.0.0.1", port))
        for start in (stack.start, stack.restart_dead):
            caplog.clear()
            asked.clear()
            started = pool.submit(start)
            wait_for(lambda: "is taken though nobody listens on it" in caplog.text, "it is said")
            assert not started.done()
            asked.set()
            started.result(PATIENCE_S)
        stack.stop()


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("0.0.0.0", "http://127.0.0.1:80"), ("::", "http://[::1]:80"), ("fd00::7", "http://[fd00::7]:80"),
        ("10.1.2.3", "http://10.1.2.3:80"), ("localhost", "http://localhost:80"), ("", "http://127.0.0.1:80"),
    ],
)  # fmt: skip
def test_a_server_is_asked_where_it_listens(host: str, url: str) -> None:
    assert find_own_url(host, 80) == url
    assert format_address(url.replace("http", "redis")) == url.removeprefix("http://")


def test_a_worker_that_died_is_not_ready_while_its_start_is_put_off(
    shared: Path, tmp_path: Path, redis_url: str, pipeline: Pipeline
) -> None:
    child = start_child([sys.executable, "-c", ""], name="decode-0")
    wait_for(lambda: not child.is_alive(), "it has ended")
    worker = WorkerSlot("decode-0", stage="decode", child=child, failures=3, started_at=math.inf, was_ready=True)
    with a_stack(tmp_path, redis_url, pipeline) as stack:
        stack.workers.append(worker)
        stack.restart_dead()
        assert worker.child is None
        assert not worker.was_ready


def test_a_model_that_no_start_would_load_ends_the_stack_at_once(
    tmp_path: Path, redis_url: str, pipeline: Pipeline
) -> None:
    model = Path(shutil.copytree(DEMO_MODEL, tmp_path / "model"))
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "intermediate_size": 8}))
    stack = ForkedStack(
        tmp_path, redis=redis_url, pipeline=pipeline.name, prefill=0, decode=0, auto=1,
        environment={"PENSTOCK_ENGINE_MODEL": str(model)},
    )  # fmt: skip
    said: list[str] = []
    with stack, pytest.raises(ModelLoadError, match=r"^cannot load model '.*in the weights, and .*by config.json"):
        stack.wait_until_ready(PATIENCE_S, said.append)
    assert stack.workers[0].num_deaths == 1
    assert not [line for line in said if "cannot load" in line], "it is said once, in the error"


def test_memory_of_a_killed_stack_goes_when_the_next_one_starts(
    shared: Path, tmp_path: Path, redis_url: str, pipeline: Pipeline
) -> None:
    (shared / "penstock-kv-arena").touch()
    owners = [start_child([sys.executable, "-c", OWNER, str(shared)], name="owner") for _ in range(2)]
    wait_for(lambda: len(list(shared.glob("*/arena"))) == 2, "both have their memory")
    owners[0].kill()
    assert len(list(shared.glob("*/arena"))) == 2
    with a_stack(tmp_path, redis_url, pipeline):
        assert len(list(shared.glob("*/arena"))) == 1, "one owner lives"
        owners[1].kill()
        with a_stack(tmp_path, redis_url, pipeline):
            assert not list(shared.glob("*/arena"))
            assert len(list(shared.glob("penstock-stack-*"))) == 2, "those of the stacks that run"
    assert [path.name for path in shared.iterdir()] == ["penstock-kv-arena"], "what is not a stack's own stays"


def test_a_directory_that_was_removed_before_it_was_locked_is_made_again(
    shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock, num_removed = fcntl.flock, 0

    def removed_first(fd: int, how: int) -> None:
        nonlocal num_removed
        if num_removed == 0:
            num_removed += 1
            next(shared.iterdir()).rmdir()
        lock(fd, how)

    monkeypatch.setattr(fcntl, "flock", removed_first)
    made = memory.StackMemory()
    assert num_removed == 1
    assert list(shared.iterdir()) == [made.path]
    made.close()
    assert not list(shared.iterdir())


def test_one_connection_serves_all_looks_at_workers_that_start(
    shared: Path, tmp_path: Path, redis_url: str, pipeline: Pipeline, server: "redis.Redis"
) -> None:
    seen: list[set[str]] = []

    def stop() -> bool:
        seen.append({one["id"] for one in server.client_list() if one["name"] == pipeline.name})
        return len(seen) > 3

    stack = a_stack(tmp_path, f"{redis_url}?client_name={pipeline.name}", pipeline)
    stack.workers = [WorkerSlot("absent", stage="decode", start_at=math.inf)]
    stack.wait_until_ready(60, stop=stop)
    before, *after = seen
    assert before == set()
    assert len(after[0]) == 1
    assert after == [after[0]] * 3


def kill_and_wait_for_restart(stack: Stack) -> None:
    """SIGKILL the stack's only worker, and wait until the next process has its name."""
    (worker,) = stack.workers
    assert worker.child is not None
    killed = worker.child
    os.kill(killed.pid, signal.SIGKILL)
    killed.wait(PATIENCE_S)

    def is_back() -> bool:
        stack.restart_dead()
        found = read_worker_status(stack.addresses)
        return any(worker.child is not None and status["pid"] == worker.child.pid for status in found)

    wait_for(is_back, "it is back")


def test_a_gateway_that_cannot_start_ends_the_waiting_with_the_cause(
    tmp_path: Path, redis_url: str, pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also on a machine that is so busy that it lived for long before it found out."""
    monkeypatch.setattr("penstock.local.stack.MIN_STEADY_S", 0.0)
    lines: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        stack = ForkedStack(tmp_path, pipeline=pipeline.name, redis=redis_url, prefill=0, decode=0, gateway=port)
        with stack, pytest.raises(PenstockError, match=f"cannot listen on 127.0.0.1:{port}"):
            stack.wait_until_ready(PATIENCE_S, lines.append)
    assert any("gateway ended with status 1" in line and "cannot listen" in line for line in lines)


def test_what_a_worker_waits_for_is_told(shared: Path, tmp_path: Path, redis_url: str, pipeline: Pipeline) -> None:
    stack, lines = a_stack(tmp_path, redis_url, pipeline), list[str]()
    child = start_child([sys.executable, "-c", "import time; time.sleep(600)"], name="one")
    stack.workers = [WorkerSlot("one", stage="decode", child=child)]
    beat = Heartbeat(redis_url, pipeline, "decode", "one", 60)
    told: list[tuple[dict[str, Any], str]] = [
        ({}, "one: loading"),
        ({"doing": "importing torch"}, "one: importing torch"),
        ({"doing": "loading weights", "progress": 0.47}, "one: loading weights 40%"),
        ({"doing": "loading weights", "progress": 0.49}, "one: loading weights 40%"),
        ({"state": "ready"}, "one: ready"),
    ]

    def wait_for_line() -> None:
        before = len(lines)
        stack.wait_until_ready(PATIENCE_S, lines.append, lambda: len(lines) > before)

    for status, _ in told:
        beat.update_status(pid=child.pid, **status)
        beat.write_beat()
        wait_for_line()
    assert lines == [line for _, line in told]
    child.kill()


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads are seen on Linux only")
def test_a_worker_computes_on_its_cores_and_its_other_threads_run_on_all(
    tmp_path: Path, redis_url: str, pipeline: Pipeline
) -> None:
    cores = list_usable_cores()
    how = {"PENSTOCK_KV_STORE_DISK_MB": "0", "PENSTOCK_WORKER_CORES": str(cores[0])}
    with Stack(tmp_path, pipeline=pipeline.name, redis=redis_url, prefill=0, decode=1, environment=how) as stack:
        stack.wait_until_ready(PATIENCE_S)
        child = stack.workers[0].child
        assert child is not None
        threads = [int(thread.name) for thread in Path(f"/proc/{child.pid}/task").iterdir()]
        found = {thread: os.sched_getaffinity(thread) for thread in threads}
        names = {Path(f"/proc/{child.pid}/task/{one}/comm").read_text().strip(): found[one] for one in threads}
    assert found[child.pid] == {cores[0]}
    assert {tuple(sorted(one)) for one in found.values()} == {(cores[0],), tuple(cores)}, names


def test_workers_of_two_stacks_have_names_of_their_own(tmp_path: Path, redis_url: str, pipeline: Pipeline) -> None:
    environment = {"PENSTOCK_KV_STORE_DISK_MB": "0"}

    def open_stack(name: str) -> Stack:
        directory = tmp_path / name
        return Stack(directory, pipeline=pipeline.name, redis=redis_url, prefill=1, decode=0, environment=environment)

    def list_names() -> list[str]:
        return sorted(str(status["name"]) for status in read_worker_status(first.addresses))

    with open_stack("first") as first:
        first.wait_until_ready(PATIENCE_S)
        with open_stack("second") as second:
            second.wait_until_ready(PATIENCE_S)
            assert list_names() == ["prefill-0", "prefill-1"]
            kill_and_wait_for_restart(second)
            assert list_names() == ["prefill-0", "prefill-1"], "it waited for its own lease to end"
        # A worker that is stopped while it loads says no goodbye: its lease runs out.
        wait_for(lambda: "prefill-1" not in list_names(), "the second stack's worker is gone")
        assert list_names() == ["prefill-0"], "the first stack's worker is still seen"


def test_workers_come_and_go_with_the_numbers_that_are_decided_and_no_answer_is_lost(
    tmp_path: Path, redis_url: str, pipeline: Pipeline
) -> None:
    def decide(number: int, leaver: str = "") -> dict[str, Any]:
        names = [str(one["name"]) for one in read_worker_status(stack.addresses)]
        there, told = {"auto": names}, {"auto": number}
        return {"there": there, "workers": told, "leave": {"auto": leaver}, "reasons": {"auto": "a test"}}

    with ForkedStack(
        tmp_path, redis=redis_url, pipeline=pipeline.name, prefill=0, decode=0, auto=1, most=3,
        environment={"PENSTOCK_KV_STORE_DISK_MB": "0"},
    ) as stack:  # fmt: skip
        stack.wait_until_ready(PATIENCE_S)
        said = stack.follow_numbers(decide(3))
        assert said == ["auto-1 is started (a test)", "auto-2 is started (a test)"]
        assert stack.follow_numbers(decide(3)) == [], "it is followed already"
        stack.wait_until_ready(PATIENCE_S)
        with Client(redis=redis_url, pipeline=pipeline.name) as client:
            ids = [client.submit("In the beginning", max_tokens=120, seed=seed) for seed in range(12)]
            assert stack.follow_numbers(decide(1, "auto-0")) == [
                "auto-2 is told to stop (a test)", "auto-0 is told to stop (a test)",
            ]  # fmt: skip
            answers = [client.result(one, timeout_s=PATIENCE_S) for one in ids]
        assert {answer.usage.completion_tokens for answer in answers} == {120}
        wait_for(lambda: not any(one.child and one.child.is_alive() for one in stack._leaving), "two have left")
        assert [str(one["name"]) for one in read_worker_status(stack.addresses)] == ["auto-1"]
        assert stack.follow_numbers(decide(2)) == ["auto-0 is started (a test)"], "the first place that is free"


PARENT = """
import sys, threading
from pathlib import Path
from penstock.local.processes import start_child
made = []
def start():
    made.append(start_child([sys.executable, "-c", "import time; time.sleep(600)"], name="child"))
thread = threading.Thread(target=start)
thread.start(); thread.join()  # the thread that asked for the child is gone; the child must live on
Path(sys.argv[1]).write_text(str(made[0].pid))
made[0].wait(600)
"""


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel ends children with their parent on Linux only")
def test_children_end_when_the_parent_is_killed(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    parent = start_child([sys.executable, "-c", PARENT, str(pid_file)], name="parent", log=tmp_path / "log")
    wait_for(lambda: pid_file.exists() and pid_file.read_text(), "the child runs")
    pid = int(pid_file.read_text())
    assert is_running(pid)
    assert parent.is_alive()
    parent.kill()
    wait_for(lambda: not is_running(pid), "the child ended too")


def test_stop_asks_first_and_then_kills(tmp_path: Path) -> None:
    stubborn = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
    )
    polite = start_child([sys.executable, "-c", "import time; time.sleep(600)"], name="polite")
    assert polite.stop(PATIENCE_S) == -signal.SIGTERM
    child = start_child([sys.executable, "-c", stubborn], name="stubborn", log=tmp_path / "log")
    wait_for(lambda: child.read_log_tail() == "up", "it ignores the signal")
    with pytest.raises(TimeoutError, match="stubborn"):
        child.wait(0.01)
    assert child.stop(0.1) == -signal.SIGKILL
    assert not child.is_alive()
