"""The example of docs/protocol.md, run as it stands there, on a live Kafka pipeline: no line of it imports Penstock."""

import os
import re
import subprocess
import sys
from pathlib import Path

from sim.forked import ForkedStack
from sim.waiting import PATIENCE_S

DOCUMENT = Path(__file__).parents[2] / "docs" / "protocol.md"


def test_the_example_runs_against_a_live_pipeline(kafka: str, tmp_path: Path) -> None:
    example = next(
        block for block in re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.S) if "__main__" in block
    )
    assert "penstock" not in "".join(re.findall(r"^import .*$", example, re.M))
    script = tmp_path / "backend.py"
    script.write_text(example)
    with ForkedStack(tmp_path / "stack", pipeline=f"example-{os.getpid()}", kafka=kafka) as stack:
        stack.wait_until_ready(PATIENCE_S)
        addresses = stack.addresses
        here = os.environ | {"KAFKA": kafka, "REDIS": addresses.stream_url, "PIPELINE": addresses.pipeline}
        done = subprocess.run(
            [sys.executable, str(script)],
            env=here,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    *text, finish_reason = done.stdout.splitlines()
    assert finish_reason in ("length", "stop")
    assert "".join(text)
