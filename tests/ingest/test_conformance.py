"""The conformance cases of examples/, run by a client of each language against Kafka, workers and a gateway."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from penstock.local.stack import Stack
from sim.kafka_server import find_jars
from tests.gateways import open_stack

CONFORMANCE = Path(__file__).parents[2] / "examples" / "conformance"
CASES = sorted((CONFORMANCE / "cases").glob("*.json"))


def find_program(name: str) -> str:
    """Return the path of a toolchain's program; skip the test where it is not installed."""
    return shutil.which(name) or pytest.skip(f"{name} is not installed")


def command_go(folder: Path) -> list[str]:
    program = str(folder / "conformance")
    subprocess.run([find_program("go"), "build", "-C", str(CONFORMANCE / "go"), "-o", program, "."], check=True)
    return [program]


def command_typescript(folder: Path) -> list[str]:
    from tests.ingest import nodejs  # only the extra `clients` brings Node

    return [nodejs.NODE, str(nodejs.project(CONFORMANCE / "node", folder) / "conformance.ts")]


def command_java(_: Path) -> list[str]:
    """The broker's jars have what pom.xml names."""
    return [find_program("java"), "-cp", f"{find_jars()}/*", str(CONFORMANCE / "java" / "Conformance.java")]


RUNNERS: dict[str, Callable[[Path], list[str]]] = {
    "python": lambda _: [sys.executable, str(CONFORMANCE / "conformance.py")],
    "go": command_go,
    "typescript": command_typescript,
    "java": command_java,
}


@pytest.fixture(scope="module")
def stack(kafka: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("conformance")
    with open_stack(folder, pipeline=f"conformance-{os.getpid()}", kafka=kafka) as stack:
        yield stack


@pytest.mark.parametrize(
    "language", ["python", *(pytest.param(one, marks=pytest.mark.clients) for one in ("go", "typescript", "java"))]
)
def test_all_cases_hold_and_a_runner_tells_of_one_that_does_not(language: str, stack: Stack, tmp_path: Path) -> None:
    false = json.loads((CONFORMANCE / "cases" / "produce.json").read_text())
    false["expect"]["result"]["usage"]["completion_tokens"] += 1
    planted = tmp_path / "planted.json"
    planted.write_text(json.dumps(false))
    here = {"KAFKA": stack.addresses.kafka, "PIPELINE": stack.addresses.pipeline}
    here |= {"GATEWAY": stack.gateway_url, "MODEL": "demo"}
    command = [*RUNNERS[language](tmp_path), *map(str, CASES), str(planted)]
    done = subprocess.run(command, env=os.environ | here, capture_output=True, text=True, check=False)
    *told, last = map(json.loads, done.stdout.splitlines())
    assert told == [{"case": path.stem, "ok": True} for path in CASES], done.stderr
    assert (last["case"], last["ok"], done.returncode) == ("planted", False, 1)
    assert last["problem"].startswith("another result")
