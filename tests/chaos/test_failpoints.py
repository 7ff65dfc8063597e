"""Failpoints: where they are, what they take for an order, and that they do what was ordered."""

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock import failpoints
from penstock.errors import SettingsError
from tools.rooms import FILES

HERE = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def disarmed() -> Iterator[None]:
    yield
    failpoints.disarm()


def test_every_point_stands_once_in_the_code_and_no_other_does() -> None:
    found: list[str] = []
    for file in FILES.values():
        for prefix, call in re.findall(r"\b(stage_|tier_)?failpoint\(([^()]*)\)", file.read_text()):
            names = re.findall(r'"([^"]+)"', call)
            # The host store's steps are those of both its tiers.
            found += [f"{tier}.{names[-1]}" for tier in ("shared", "disk")] if prefix == "tier_" and names else names
        for kind in re.findall(r"\bpoints = failpoints\.([A-Z]+)", file.read_text()):  # of one kind of reader
            found += getattr(failpoints, kind)
    # Both kinds of workers without stages hand a request to an engine of their own.
    assert sorted(found) == sorted([*failpoints.POINTS, "endpoint.2.asked"])


@pytest.mark.parametrize("order", ["decode.7.sent", "decode.7.gone=kill", "decode.7.sent=exit", "decode.7.sent=kill@0"])
def test_an_order_that_is_none_is_an_error(order: str) -> None:
    with pytest.raises(SettingsError, match=re.escape(order)):
        failpoints.arm(f"settle.done=kill,{order}")


def test_the_process_fails_at_the_passage_that_was_ordered() -> None:
    code = """
from penstock import failpoints
failpoints.arm("decode.7.sent=kill@3,settle.done=kill@2")
for number in range(1, 9):
    failpoints.failpoint("decode.7.stepped")
    print(number, flush=True)
    failpoints.failpoint("decode.7.sent")
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=HERE, capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL
    assert done.stdout.split() == ["1", "2", "3"]
    assert done.stderr == "failpoint decode.7.sent: kill at passage 3\n"
