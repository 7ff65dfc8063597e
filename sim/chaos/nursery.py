"""Worker processes that start fast: the modules are imported once, and each worker is forked from there.

`python -m sim.chaos.nursery SOCKET` imports what a worker needs, six seconds' worth, and then forks one for each
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
from penstock.waiting import wait_until
from sim.chaos import clock
from sim.chaos.disk import Disk, pretend


class Nursery:
    """The process, and what it says of those it has forked. Thread-safe."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / "nursery"
        self.disk = Disk(directory)
        """All its workers have it."""
        command = self.disk.command([sys.executable, "-m", "sim.chaos.nursery", str(path)])
        self._process = start_child(command, name="nursery", log=directory / "nursery.log")
        wait_until(lambda: path.exists() or not self._process.is_alive(), 120, "the nursery is ready")
        self.disk.look_from(self._process.pid)
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(str(path))
        self._lock = threading.Condition()
        self._told: dict[int, int] = {}
        """Status by pid, as `os.waitpid` gives it: of those that stopped last, or ended."""
        self._born: list[int] = []
        self._thread = threading.Thread(target=self._listen, name="nursery", daemon=True)
        self._thread.start()

    def fork(self, name: str, command: str, environment: dict[str, str], log: Path, clock: Path) -> Child:
        """A worker of a stage, as a child like any other. Its wall clock is the one given (`sim.chaos.clock`)."""
        order = {"stage": command, "environment": environment, "log": str(log), "clock": str(clock)}
        order["full"] = "" if self.disk.is_real else str(self.disk.path)
        with self._lock:
            self._socket.sendall(json.dumps(order).encode() + b"\n")
            if not self._lock.wait_for(lambda: self._born, 60):
                raise TimeoutError("the nursery forks nothing; its log ends:\n" + self._process.read_log_tail())
            pid = self._born.pop()
        return Child(name, cast(Any, Forked(self, pid)), log)

    def status(self, pid: int) -> int | None:
        """The exit status of a process that ended, minus the signal's number for a signal; else None."""
        with self._lock:
            told = self._told.get(pid)
        return None if told is None or os.WIFSTOPPED(told) else os.waitstatus_to_exitcode(told)

    def is_stopped(self, pid: int) -> bool:
        """Whether it has stopped, as by SIGSTOP, since it was last continued."""
        with self._lock:
            return os.WIFSTOPPED(self._told.get(pid, 0))

    def send(self, pid: int, number: int) -> None:
        """Send a signal, unless it has ended."""
        with self._lock:
            told = self._told.get(pid)
            if told is None or os.WIFSTOPPED(told):
                self._told.pop(pid, None)
                os.kill(pid, number)

    def wait(self, pid: int, timeout_s: float | None) -> int:
        """Wait for the end of one."""
        with self._lock:
            if not self._lock.wait_for(lambda: self.status(pid) is not None, timeout_s):
                raise TimeoutExpired(str(pid), timeout_s or 0.0)
        status = self.status(pid)
        assert status is not None
        return status

    def close(self) -> None:
        """End the process, and all that it has forked."""
        self._process.kill()
        self._thread.join()
        self._socket.close()

    def _listen(self) -> None:
        with self._socket.makefile() as lines:
            for line in lines:
                pid, status = json.loads(line)
                with self._lock:
                    if status is None:
                        self._born.append(pid)
                    else:
                        self._told[pid] = status
                    self._lock.notify_all()


class Forked:
    """What `penstock.local.processes.Child` asks of a process."""

    def __init__(self, nursery: Nursery, pid: int) -> None:
        self.pid, self._nursery = pid, nursery

    def poll(self) -> int | None:
        """Its exit status, None while it runs."""
        return self._nursery.status(self.pid)

    def wait(self, timeout: float | None = None) -> int:
        """Its exit status, once it has ended."""
        return self._nursery.wait(self.pid, timeout)

    def send_signal(self, number: int) -> None:
        """Send a signal."""
        self._nursery.send(self.pid, number)


# In the nursery's process.


def serve(path: Path) -> None:
    """Fork what is ordered, and tell what becomes of it, until the other side is gone."""
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
            news = cast(socket.socket, key.fileobj).recv(2**16)
            if key.fileobj is woken:
                _report(client)
            elif not news:
                return
            else:
                *orders, pending = (pending + news).split(b"\n")
                for order in orders:
                    _say(client, _fork(json.loads(order)), None)


def _fork(order: dict[str, Any]) -> int:
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        try:
            _be_worker(parent, order)
        finally:
            os._exit(1)
    return pid


def _be_worker(parent: int, order: dict[str, Any]) -> None:
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
    clock.follow(Path(order["clock"]))
    if order["full"]:
        pretend(order["full"])
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


def _report(client: socket.socket) -> None:
    """Tell of all that ended or stopped."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG | os.WUNTRACED)
        except ChildProcessError:
            return
        if pid == 0:
            return
        _say(client, pid, status)


def _say(client: socket.socket, pid: int, status: int | None) -> None:
    client.sendall(json.dumps([pid, status]).encode() + b"\n")


if __name__ == "__main__":
    serve(Path(sys.argv[1]))
