"""An engine in its own process, as the benchmark has it: asked in turns, stopped between them."""

import contextlib
import json
import multiprocessing
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.peers.serve import serve_pipes
from benchmarks.peers.setup import DIRECTORY, environment_python, is_installed
from sim.forked import ForkedProcess

ROOT = Path(__file__).parents[2]
OWN = ("penstock", "generate", "limits")
"""These run in the environment of the benchmark."""
_END_S = 15.0


class SideFailed(Exception):
    """An engine that said no, or nothing, or ended."""


def is_available(name: str) -> bool:
    """Whether the engine can be started here."""
    return name in OWN or is_installed(name)


class Side:
    """One engine's process group. It runs only while it is asked: an idle runtime may spin, and take others' core."""

    def __init__(
        self, name: str, log: Path, threads: int, pool_mb: int, *, is_forked: bool = False, python: Path | None = None
    ) -> None:
        """Start it. One of ours can be forked from a process that has imported what it needs; another one can have a
        `python` elsewhere than in its environment.
        """
        self.name = name
        self.log = log
        python = python or (Path(sys.executable) if name in OWN else environment_python(name))
        environment = os.environ | find_variables(name, python, threads, pool_mb)
        theirs_in, self._questions = multiprocessing.Pipe(duplex=False)
        self._answers, theirs_out = multiprocessing.Pipe(duplex=False)
        self._process: subprocess.Popen[bytes] | ForkedProcess
        log.write_bytes(b"")
        if is_forked and name in OWN:
            self._process = ForkedProcess(serve_pipes, log, environment, name, theirs_in, theirs_out)
        else:
            with log.open("ab") as errors:
                self._process = subprocess.Popen(
                    [str(python), "-m", "benchmarks.peers.serve", name], cwd=ROOT, env=environment, stderr=errors,
                    stdin=theirs_in.fileno(), stdout=theirs_out.fileno(), start_new_session=True,
                )  # fmt: skip
        theirs_in.close()
        theirs_out.close()
        # It kills the group when this process has ended, however it ended: its stdin ends with us.
        command = ["sh", "-c", f"cat >/dev/null; kill -KILL -- -{self._process.pid}"]
        self._guard = subprocess.Popen(
            command, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
        )
        self._signal(signal.SIGSTOP)

    def ask(self, do: str, timeout_s: float = 600.0, **given: Any) -> Any:
        """Let it run, ask, and return the answer. Raises `SideFailed`; the process is of no use after a timeout."""
        self._signal(signal.SIGCONT)
        try:
            return self._exchange(json.dumps({"do": do, "with": given}).encode() + b"\n", timeout_s)
        finally:
            self._signal(signal.SIGSTOP)

    def _exchange(self, question: bytes, timeout_s: float) -> Any:
        try:
            with open(self._questions.fileno(), "wb", closefd=False) as questions:
                questions.write(question)
        except OSError as error:
            raise SideFailed(f"{self.name} is gone: {error}; see {self.log}") from None
        line, end_s = b"", time.monotonic() + timeout_s
        while not line.endswith(b"\n"):
            ready, _, _ = select.select([self._answers], [], [], max(0.0, end_s - time.monotonic()))
            piece = os.read(self._answers.fileno(), 2**20) if ready else b""
            if not piece:
                what = "ended" if ready else f"did not answer within {timeout_s:.0f} s"
                raise SideFailed(f"{self.name} {what}; see {self.log}")
            line += piece
        reply = json.loads(line)
        if "error" in reply:
            raise SideFailed(f"{self.name}: {reply['error']}; see {self.log}")
        return reply["is"]

    def close(self) -> None:
        """End it, and all that it started."""
        self._questions.close()
        self._signal(signal.SIGCONT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_S)
        self._signal(signal.SIGKILL)
        self._process.wait()
        self._guard.communicate()
        self._answers.close()

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)


def start_lmcache(exits: contextlib.ExitStack, directory: Path, url: str, *, threads: int, **shape: int) -> Side:
    """Start LMCache on a Redis, until `exits` end. Its log lies in `directory`. Raises `SideFailed` if it does not run.

    `shape` is what `benchmarks/peers/engines/lmcache.py` needs in its `load`, beside the address.
    """
    if not is_available("lmcache"):
        raise SideFailed("not installed; `python -m benchmarks.peers.setup` installs it")
    side = Side("lmcache", directory / f"lmcache-{url.partition(':')[0]}-{shape['chunk']}.log", threads, pool_mb=0)
    exits.callback(side.close)
    side.ask("load", model=str(directory), url=url, **shape)
    return side


def find_variables(name: str, python: Path, threads: int, pool_mb: int) -> dict[str, str]:
    """What has to be in an engine's environment before it starts."""
    common = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    if name != "vllm":
        return common
    libraries = python.parents[1] / "lib"
    wished = (libraries / file for file in ("libiomp5.so", "libtcmalloc_minimal.so.4"))
    return common | {
        "LD_PRELOAD": ":".join(str(file) for file in wished if file.exists()),
        # It would keep a core for itself, and compute on one thread less than the others.
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, range(threads))),
        "VLLM_CPU_KVCACHE_SPACE": str(pool_mb // 1024),
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_CACHE_ROOT": str(DIRECTORY / "vllm-cache"),
    }
