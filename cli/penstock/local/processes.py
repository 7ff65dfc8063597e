"""Child processes that end with their parent, free ports, and waiting for a condition.

On Linux the kernel does the ending (`PR_SET_PDEATHSIG`), so it holds even when the parent is killed. The
signal is tied to the *thread* that forked, so all children are forked by one thread that lives as long as the
process. Elsewhere children end when the parent exits in an orderly way.
"""

import atexit
import contextlib
import os
import queue
import secrets
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path

from penstock.errors import DependencyMissing
from penstock.waiting import wait_until

# Runs in the child before the program: requests SIGKILL for when its parent ends, and checks whether it has meanwhile.
_LAUNCHER = """
import ctypes, os, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, 9, 0, 0, 0)
if os.getppid() == int(sys.argv[1]):
    os.execvp(sys.argv[2], sys.argv[2:])
"""

Fork = Callable[[], "subprocess.Popen[bytes]"]
ForkQueue = queue.SimpleQueue["tuple[Future[subprocess.Popen[bytes]], Fork]"]

_spawn_lock = threading.Lock()
_spawn_queue: ForkQueue = queue.SimpleQueue()
_spawner_pid = 0
_children: "set[Child]" = set()


class Child:
    """A process that was started here. Its output is in `log`."""

    def __init__(self, name: str, process: "subprocess.Popen[bytes]", log: Path | None) -> None:
        self.name = name
        self.log = log
        self._process = process
        self._owner = os.getpid()

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """The exit status, or minus the number of the signal that ended the process; None while it runs."""
        return self._process.poll()

    def is_alive(self) -> bool:
        """Return whether the process still runs."""
        if self._process.poll() is None:
            return True
        _children.discard(self)
        return False

    def wait(self, timeout_s: float) -> int:
        """Wait for the process to end and return its exit status. Raises `TimeoutError`."""
        try:
            code = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"{self.name} (pid {self.pid}) still runs after {timeout_s:g} s") from None
        _children.discard(self)
        return code

    def stop(self, timeout_s: float = 10.0) -> int:
        """Ask the process to end, wait, and kill it if it does not. Returns the exit status."""
        self.send_signal(signal.SIGTERM)
        try:
            return self.wait(timeout_s)
        except TimeoutError:
            return self.kill()

    def kill(self) -> int:
        """Kill the process, as a crash would. Returns the exit status."""
        self.send_signal(signal.SIGKILL)
        return self.wait(30.0)

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal (SIGSTOP and SIGCONT make a pause), unless the process has ended."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)

    def read_log_tail(self, num_lines: int = 20) -> str:
        """Return the last lines of the log, for an error message."""
        if self.log is None or not self.log.exists():
            return ""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-num_lines:])


def start_child(
    command: Sequence[str],
    *,
    name: str,
    log: Path | None = None,
    environment: Mapping[str, str] | None = None,
    directory: Path | None = None,
    inherited: Sequence[int] = (),
) -> Child:
    """Start a program that is killed when this process dies; its output is appended to `log`.

    It inherits the file descriptors in `inherited`.

    It runs in a session of its own: Ctrl-C reaches the parent alone, which ends its children in order.
    """
    full = [sys.executable, "-I", "-S", "-c", _LAUNCHER, str(os.getpid()), *command]

    def fork() -> "subprocess.Popen[bytes]":
        with contextlib.ExitStack() as stack:
            out = subprocess.DEVNULL if log is None else stack.enter_context(log.open("ab"))
            return subprocess.Popen(
                full,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                cwd=directory,
                env=None if environment is None else dict(environment),
                start_new_session=True,
                pass_fds=inherited,
            )

    child = Child(name, _fork_on_spawner_thread(fork), log)
    _children.add(child)
    return child


def _fork_on_spawner_thread(fork: Fork) -> "subprocess.Popen[bytes]":
    global _spawner_pid, _spawn_queue  # noqa: PLW0603 - one thread a process, made when first needed
    with _spawn_lock:
        if _spawner_pid != os.getpid():
            _spawn_queue = queue.SimpleQueue()
            threading.Thread(target=_serve_forks, args=(_spawn_queue,), name="spawner", daemon=True).start()
            _spawner_pid = os.getpid()
    done: Future[subprocess.Popen[bytes]] = Future()
    _spawn_queue.put((done, fork))
    return done.result()


def _serve_forks(work: ForkQueue) -> None:
    while True:
        done, fork = work.get()
        try:
            done.set_result(fork())
        except BaseException as error:  # handed to the caller
            done.set_exception(error)
        del done, fork


@atexit.register
def _stop_children() -> None:
    for child in [child for child in _children if child._owner == os.getpid()]:  # noqa: SLF001
        with contextlib.suppress(TimeoutError):
            child.kill()


_reserved_ports: set[int] = set()


def find_free_port() -> int:
    """Return a TCP port that is free on this machine now, and was not returned before.

    It is below the range for outgoing connections, so none of these takes it before the server binds it.
    """
    while True:
        port = 15_000 + secrets.randbelow(17_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            if port not in _reserved_ports:
                _reserved_ports.add(port)
                return port


def wait_until_serving(child: Child, condition: Callable[[], object], timeout_s: float) -> None:
    """Wait until a server that was started here answers. Raises `DependencyMissing` if it cannot run here."""
    with contextlib.suppress(TimeoutError):
        wait_until(lambda: not child.is_alive() or condition(), timeout_s, child.name, every_s=0.02)
        if child.is_alive():
            return
    state = "does not answer" if child.is_alive() else f"ended with status {child.returncode}"
    tail = child.read_log_tail()
    child.kill()
    raise DependencyMissing(f"{child.name} {state}; its log ends:\n{tail}")
