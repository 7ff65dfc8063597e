"""Child processes that start at once: forked from a process that has imported what they need (`sim/warm.py`)."""

import contextlib
import ctypes
import logging
import multiprocessing
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from multiprocessing import forkserver, resource_tracker, util
from pathlib import Path
from subprocess import TimeoutExpired
from typing import Any, cast
from unittest import mock

from penstock.local.processes import Child
from penstock.local.stack import ProcessSlot, Stack
from sim.waiting import wait_for

_context = multiprocessing.get_context("forkserver")
_spawn = util.spawnv_passfds


def preload_modules(*modules: str) -> None:
    """Let the forking process import these modules, too. Call it before the first fork."""
    _context.set_forkserver_preload(["sim.warm", *modules])


preload_modules()


def _start_server() -> None:
    """Start the process that forks. Hashes of strings are the same in all processes: the simulated world needs it."""
    with mock.patch.dict(os.environ, PYTHONHASHSEED="0"):
        forkserver.ensure_running()


def fork_server() -> None:
    """Let a fork of this process, which has one thread as yet, be the one that forks, if all of it is imported here.

    Where the hashes of strings are not those that the simulated world needs, one is started when it is needed.
    """
    if "sim.warm" in sys.modules and not sys.flags.hash_randomization:
        resource_tracker.ensure_running()
        with mock.patch.object(util, "spawnv_passfds", _fork_server):
            forkserver.ensure_running()


def _fork_server(_path: object, arguments: Sequence[str], passed: Sequence[int]) -> int:
    """Fork where multiprocessing would execute `arguments`, and become the same in the child."""
    if pid := os.fork():
        return pid
    try:
        end_with_parent()
        pipes = {os.fstat(fd).st_ino for fd in passed}
        for fd in {int(name) for name in os.listdir("/proc/self/fd")}.difference(passed):
            with contextlib.suppress(OSError):
                if os.fstat(fd).st_ino in pipes:
                    os.close(fd)  # the other end: the server ends when the processes that have it have ended
        vars(forkserver._forkserver)["_lock"] = threading.RLock()  # noqa: SLF001 - the copy of it is held
        util.spawnv_passfds = _spawn
        _undo_what_pytest_set()
        exec(arguments[-1], {})
    finally:
        os._exit(0)


def _undo_what_pytest_set() -> None:
    sys.unraisablehook, threading.excepthook = sys.__unraisablehook__, threading.__excepthook__
    logging.root.handlers.clear()
    warnings.resetwarnings()
    for category in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
        warnings.simplefilter("ignore", category)


class ForkedProcess:
    """A forked process with the methods that `Child` needs."""

    def __init__(self, call: Callable[..., int | None], log: Path, environment: Mapping[str, str], *given: Any) -> None:
        _start_server()
        arguments = (call.__module__, call.__name__, str(log), dict(environment), given)
        self._process = _context.Process(target=_run_child, args=arguments, daemon=True)
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def poll(self) -> int | None:
        """Return its exit status, or None while it runs."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Wait until it has ended and return its exit status."""
        self._process.join(timeout)
        if (status := self._process.exitcode) is None:
            raise TimeoutExpired(str(self.pid), timeout or 0.0)
        return status

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)


def pause_process(pid: int) -> None:
    """Send SIGSTOP to a process and wait until none of its threads runs. On a busy machine that takes a moment."""
    os.kill(pid, signal.SIGSTOP)
    wait_for(lambda: _list_states(pid) <= set("TtXZ"), f"process {pid} stands still")


def is_stopped(pid: int) -> bool:
    """Return whether a process lives and none of its threads runs, as after SIGSTOP."""
    return "T" in (states := _list_states(pid)) and states <= set("TtXZ")


def _list_states(pid: int) -> set[str]:
    """Return the letters by which the kernel tells the states of a process's threads."""
    states = set[str]()
    for stat in Path(f"/proc/{pid}/task").glob("*/stat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            states.add(stat.read_text().rpartition(")")[2].split()[0])
    return states


def fork_process(
    name: str, log: Path, call: Callable[..., int | None], *given: Any, environment: Mapping[str, str] = os.environ
) -> Child:
    """Run `call(*given)`, a function of a module, in a process that exits with its result and prints into `log`."""
    return Child(name, cast(Any, ForkedProcess(call, log, environment, *given)), log)


class ForkedStack(Stack):
    """A stack whose workers and gateway are forked."""

    def _start_child(self, slot: ProcessSlot, arguments: list[str], environment: Mapping[str, str]) -> Child:
        return fork_process(slot.name, self._log_path(slot), run_penstock, *arguments, environment=environment)

    def kill_all(self) -> None:
        """Kill all processes, the server among them, as a fire would. `restart_dead` starts them again."""
        for slot in self._all_slots():
            if slot.child is not None:
                slot.child.kill()
        if self._server is not None:
            self._server.kill()

    def list_pids(self) -> list[int]:
        """Return the ids of all living processes, those of workers first, then the gateway's and the server's."""
        living = [slot.child.pid for slot in self._all_slots() if slot.child is not None and slot.child.is_alive()]
        server = self._server.pid if self._server is not None else None
        return [*living, *([server] if server else [])]


def run_penstock(*arguments: str) -> None:
    """Run the `penstock` command."""
    from penstock.cli.main import main

    sys.argv = ["penstock", *arguments]
    main()


def end_with_parent() -> None:
    """Let the kernel kill this process when its parent ends, however that ends."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG


def _run_child(module: str, name: str, log: str, environment: Mapping[str, str], given: tuple[Any, ...]) -> None:
    """Run in the child: become a process like those of `start_child`, and call the function."""
    end_with_parent()
    os.setsid()
    multiprocessing.current_process().daemon = False  # it may fork processes itself
    out = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.environ.clear()
    os.environ.update(environment)
    sys.exit(getattr(import_module(module), name)(*given))
