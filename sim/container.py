"""A process that has what a container has: file systems, a host name, a user and limits of its own.

They are those of a namespace, and disappear with it. No engine of containers is needed, and no root.
"""

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from penstock.local.processes import Child, find_free_port, start_child
from penstock.own_servers import ask_own
from penstock.waiting import wait_until
from sim.waiting import PATIENCE_S

ROOT = Path(__file__).parents[1]
SHARED_MEMORY = Path("/dev/shm")
_UNSHARE_COMMAND = ["unshare", "--user", "--map-root-user", "--mount", "--uts", "sh", "-euc"]


@dataclass(frozen=True)
class Container:
    """What differs from this machine."""

    sizes: Mapping[Path, str] = field(default_factory=lambda: {SHARED_MEMORY: "64m"})
    """The directories that are file systems in memory of their own, each with its size. By default that of Docker."""
    is_read_only: bool = False
    """Whether all other files are."""
    host_name: str = ""
    user: int | None = None
    """The id of a user that is nowhere else; None: root."""
    max_files: int | None = None
    """How many files a process may open."""

    def build_command(self, command: Sequence[str]) -> list[str]:
        """Return what runs a command in it."""
        lines = [f"mount -t tmpfs -o size={size} tmpfs {shlex.quote(str(at))}" for at, size in self.sizes.items()]
        if self.host_name:
            lines.append(f"printf %s {shlex.quote(self.host_name)} > /proc/sys/kernel/hostname")
        if self.is_read_only:
            lines.append("mount -o remount,bind,ro /")
        if self.max_files is not None:
            lines.append(f"ulimit -n {self.max_files}")
        user = f"unshare --user --map-user={self.user} --map-group={self.user} -- " if self.user is not None else ""
        return [*_UNSHARE_COMMAND, "\n".join([*lines, f"exec {user}{shlex.join(command)}"])]

    def find_problem(self) -> str:
        """Return why there can be none here; empty if there can."""
        try:
            tried = subprocess.run(self.build_command(["true"]), capture_output=True, text=True, check=False)
        except OSError as error:
            return f"no namespaces here: {error}"
        return f"no namespaces here: {tried.stderr.strip()[-200:]}" if tried.returncode else ""

    def start_command(
        self, directory: Path, command: Sequence[str], environment: Mapping[str, str] | None = None
    ) -> Child:
        """Start a command; its log is `log` in a directory."""
        return start_child(
            self.build_command(command), name="container", log=directory / "log", directory=ROOT,
            environment=environment,
        )  # fmt: skip


def ask_penstock_up(container: Container, directory: Path, settings: Mapping[str, str], patience_s: float) -> str:
    """Run `penstock up` in a container until it has answered a prompt, and return the answer.

    Its data is a file system of its own. Raises `ChildProcessError` if it ends before, and `TimeoutError`.
    """
    data = directory / "data"
    data.mkdir(parents=True)
    container = replace(container, sizes={data: "50%", **container.sizes})
    port, gateway = find_free_port(), find_free_port()
    command = [sys.executable, "-m", "penstock.cli.main", "up", "--port", str(port), "--gateway-port", str(gateway)]
    environment = {  # not where this process keeps what torch compiles
        name: value for name, value in os.environ.items() if not name.startswith(("PENSTOCK_", "TORCH", "TMP"))
    }
    child = container.start_command(
        directory, [*command, "--data", str(data)], {**environment, "HOME": "/", **settings}
    )
    body = json.dumps({"model": "demo", "prompt": "In the beginning", "max_tokens": 40, "temperature": 0}).encode()
    answers: list[str] = []

    def has_answered() -> bool:
        if not child.is_alive():
            raise ChildProcessError(child.read_log_tail(1))
        with suppress(OSError), ask_own(f"http://127.0.0.1:{gateway}/v1/completions", body) as answer:
            answers.append(json.load(answer)["choices"][0]["text"])
        return bool(answers)

    try:
        wait_until(has_answered, patience_s, "the container answers", every_s=0.5)
    finally:
        child.stop(timeout_s=60.0)
    return answers[0]


def run_on_small_disk(directory: Path, num_pages: int, module: str, what: str) -> Child:
    """Run `python -m MODULE DISK WHAT` to its end, on a disk of `num_pages` pages of 4 KiB that only it sees."""
    disk = directory / "disk"
    disk.mkdir()
    container = Container({disk: str(num_pages * 4096)})
    if problem := container.find_problem():
        pytest.skip(problem)
    child = container.start_command(directory, [sys.executable, "-m", module, str(disk), what])
    child.wait(PATIENCE_S)
    return child


def fill_disk(directory: Path, num_pages_left: int = 0) -> Path:
    """Fill a file system but for `num_pages_left` pages. Returns the path of the file that fills it."""
    system = os.statvfs(directory)
    path = directory / "another's"
    path.write_bytes(bytes(system.f_bavail * system.f_frsize - num_pages_left * 4096))
    return path
