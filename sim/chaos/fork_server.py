"""Worker processes that start fast: the modules are imported once, and each worker is forked from there.

`python -m sim.chaos.fork_server SOCKET` imports what a worker needs, six seconds' worth, and then forks one for each
order that comes in. A worker does everything else itself, from reading its settings to loading the model and proving
the engine, in the code that `penstock worker` runs. No thread, connection or model exists before the fork.
"""

import ctypes
import importlib
import json
import logging
import os
import selectors
import signal
import socket
import sys
import threading
from pathlib import Path
from subprocess import TimeoutExpired
from typing import Any, cast

from penstock.local.processes import Child, start_child
from sim.chaos import clock
from sim.chaos.disk import SmallDisk, simulate_full_disk
from sim.waiting import PATIENCE_S, wait_for


class ForkServer:
    """The process that forks workers, and the statuses it reports. Thread-safe."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / "fork-server"
        self.disk = SmallDisk(directory)
        """The disk that all its workers share."""
        command = self.disk.wrap_command([sys.executable, "-m", "sim.chaos.fork_server", str(path)])
        self._process = start_child(command, name="fork-server", log=directory / "fork-server.log")
        wait_for(lambda: path.exists() or not self._process.is_alive(), "the fork server is ready")
        self.disk.view_through(self._process.pid)
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(str(path))
        self._lock = threading.Condition()
        self._statuses: dict[int, int] = {}
        """Status by pid as `os.waitpid` gives it, of processes that stopped or ended."""
        self._new_pids: list[int] = []
        self._thread = threading.Thread(target=self._read_statuses, name="fork-server", daemon=True)
        self._thread.start()

    def fork_worker(self, name: str, command: str, environment: dict[str, str], log: Path, clock: Path) -> Child:
        """Fork a worker of a stage. Its wall clock is the one given (see `sim.chaos.clock`)."""
        order = {"stage": command, "environment": environment, "log": str(log), "clock": str(clock)}
        order["full"] = "" if self.disk.is_real else str(self.disk.path)
        with self._lock:
            self._socket.sendall(json.dumps(order).encode() + b"\n")
            if not self._lock.wait_for(lambda: self._new_pids, PATIENCE_S):
                raise TimeoutError("the fork server forks nothing; its log ends:\n" + self._process.read_log_tail())
            pid = self._new_pids.pop()
        return Child(name, cast(Any, ForkedWorker(self, pid)), log)

    def get_status(self, pid: int) -> int | None:
        """Return the exit status of a process (minus the number of the signal that ended it), or None while it runs."""
        with self._lock:
            status = self._statuses.get(pid)
        return None if status is None or os.WIFSTOPPED(status) else os.waitstatus_to_exitcode(status)

    def is_stopped(self, pid: int) -> bool:
        """Return whether a process is stopped, as by SIGSTOP."""
        with self._lock:
            return os.WIFSTOPPED(self._statuses.get(pid, 0))

    def send_signal(self, pid: int, number: int) -> None:
        """Send a signal to a process unless it has ended."""
        with self._lock:
            status = self._statuses.get(pid)
            if status is None or os.WIFSTOPPED(status):
                self._statuses.pop(pid, None)
                os.kill(pid, number)

    def wait_for_exit(self, pid: int, timeout_s: float | None) -> int:
        """Wait until a process has ended and return its exit status. Raises `TimeoutExpired`."""
        with self._lock:
            if not self._lock.wait_for(lambda: self.get_status(pid) is not None, timeout_s):
                raise TimeoutExpired(str(pid), timeout_s or 0.0)
        status = self.get_status(pid)
        assert status is not None
        return status

    def close(self) -> None:
        """Kill the process and all that it has forked."""
        self._process.kill()
        self._thread.join()
        self._socket.close()

    def _read_statuses(self) -> None:
        with self._socket.makefile() as lines:
            for line in lines:
                pid, status = json.loads(line)
                with self._lock:
                    if status is None:
                        # The system gives the numbers of ended processes out again.
                        self._statuses.pop(pid, None)
                        self._new_pids.append(pid)
                    else:
                        self._statuses[pid] = status
                    self._lock.notify_all()


class ForkedWorker:
    """What `penstock.local.processes.Child` asks of a process."""

    def __init__(self, fork_server: ForkServer, pid: int) -> None:
        self.pid, self._fork_server = pid, fork_server

    def poll(self) -> int | None:
        """Return its exit status, or None while it runs."""
        return self._fork_server.get_status(self.pid)

    def wait(self, timeout: float | None = None) -> int:
        """Wait until it has ended and return its exit status."""
        return self._fork_server.wait_for_exit(self.pid, timeout)

    def send_signal(self, number: int) -> None:
        """Send a signal."""
        self._fork_server.send_signal(self.pid, number)


# In the fork server's process.


def serve_orders(path: Path) -> None:
    """Fork a worker for each order and report statuses, until the other side closes the socket."""
    importlib.import_module("sim.warm")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path.with_suffix(".new")))
        server.listen(1)
        path.with_suffix(".new").rename(path)
        client = server.accept()[0]
    woken, wake = socket.socketpair()
    wake.setblocking(False)
    signal.set_wakeup_fd(wake.fileno())
    signal.signal(signal.SIGCHLD, lambda *_: None)
    selector = selectors.DefaultSelector()
    selector.register(client, selectors.EVENT_READ)
    selector.register(woken, selectors.EVENT_READ)
    pending = b""
    while True:
        for key, _ in selector.select():
            received = cast(socket.socket, key.fileobj).recv(2**16)
            if key.fileobj is woken:
                _send_statuses(client)
            elif not received:
                return
            else:
                *orders, pending = (pending + received).split(b"\n")
                for order in orders:
                    _send_status(client, _fork_process(json.loads(order)), None)


def _fork_process(order: dict[str, Any]) -> int:
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        try:
            _run_worker(parent, order)
        finally:
            os._exit(1)
    return pid


def _run_worker(parent: int, order: dict[str, Any]) -> None:
    """From here on, a process as `start_child` starts it, in which `penstock worker` runs."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        return
    os.setsid()
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    log = os.open(order["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.closerange(3, 4096)
    clock.follow_clock(Path(order["clock"]))
    if order["full"]:
        simulate_full_disk(order["full"])
    os.environ.clear()
    os.environ.update(order["environment"])
    sys.argv = ["penstock", "worker", order["stage"]]
    from penstock.cli.main import main

    logging.raiseExceptions = True
    try:
        main()
    except SystemExit as left:
        os._exit(left.code if isinstance(left.code, int) else 0 if left.code is None else 1)
    except BaseException:  # the end of a process that nobody waits for with an exception
        logging.exception("the worker fell")
    os._exit(1)


def _send_statuses(client: socket.socket) -> None:
    """Report the status of every process that ended or stopped."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG | os.WUNTRACED)
        except ChildProcessError:
            return
        if pid == 0:
            return
        _send_status(client, pid, status)


def _send_status(client: socket.socket, pid: int, status: int | None) -> None:
    client.sendall(json.dumps([pid, status]).encode() + b"\n")


if __name__ == "__main__":
    serve_orders(Path(sys.argv[1]))
