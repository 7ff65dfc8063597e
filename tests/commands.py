"""`penstock` as a user runs it: as a process, or in this one, without waiting for Python to start."""

import io
import os
import subprocess
import sys
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from penstock.cli.main import main
from penstock.local.processes import find_free_port

HERE = Path(__file__).parents[1]
SCREEN = {"COLUMNS": "200"}


def penstock(*arguments: str, **environment: str) -> "CompletedProcess[str]":
    """The command as a process, where no Redis answers unless the environment says so."""
    command = [sys.executable, "-m", "penstock.cli.main", *arguments]
    here = {**os.environ, **SCREEN, "PENSTOCK_STREAM_URL": f"redis://127.0.0.1:{find_free_port()}/0", **environment}
    return subprocess.run(command, env=here, cwd=HERE, text=True, capture_output=True, check=False)


class Terminal:
    """The same in this process. What a user would see as a traceback is raised."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._patch, self._capture = monkeypatch, capsys

    def __call__(self, *arguments: str, typed: str = "", **environment: str) -> "CompletedProcess[str]":
        """Run a command to its end; `typed` is what it can read."""
        self._capture.readouterr()
        command = ["penstock", *arguments]
        with self._patch.context() as patched:
            patched.setattr("sys.argv", command)
            patched.setattr("sys.stdin", io.StringIO(typed))
            here = {**SCREEN, "PENSTOCK_STREAM_URL": f"redis://127.0.0.1:{find_free_port()}/0", **environment}
            for name, value in here.items():
                patched.setenv(name, value)
            with pytest.raises(SystemExit) as ended:
                main()
        printed, code = self._capture.readouterr(), ended.value.code
        assert code is None or isinstance(code, int)
        return CompletedProcess(command, code or 0, printed.out, printed.err)
