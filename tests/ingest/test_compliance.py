"""Suites of others that say what an API must answer, against a gateway with the model that calls tools."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from penstock.local.stack import Stack
from sim.workload import TOOL_MODEL
from tests.ingest import nodejs

MODEL = str(TOOL_MODEL)
IMAGES = {"chat-image-input", "image-input", "anth-image-input"}
"""The tool model reads text."""
COMPACTING = {"compact-response"}
"""The suite warns of servers that do not compact."""


def run_suite(command: list[str], **options: Any) -> dict[str, dict[str, Any]]:
    """Run a suite that prints its results as JSON; return those by the test's id."""
    done = subprocess.run(command, capture_output=True, text=True, check=False, **options)
    assert done.stdout.startswith("{"), done.stdout[-2000:] + done.stderr[-4000:]
    return {result["id"]: result for result in json.loads(done.stdout)["results"]}


@pytest.mark.parametrize(("form", "num_tests"), [("openai-chat", 8), ("open-responses", 12), ("anthropic", 8)])
def test_llm_comply_finds_nothing_missing_but_images(tool_stack: Stack, form: str, num_tests: int) -> None:
    url = f"{tool_stack.gateway_url}/v1"
    command = ["-m", "llm_comply.cli", "run", "-u", url, "-k", "none", "-m", MODEL, "--format", form, "--json"]
    results = run_suite([sys.executable, *command, "--timeout", "3600"])
    assert len(results) == num_tests
    assert {name for name, result in results.items() if result["status"] != "passed"} == results.keys() & IMAGES, (
        results
    )
    assert {name for name, result in results.items() if result.get("warnings")} <= COMPACTING, results


def test_the_suite_of_open_responses_finds_nothing_missing_but_images(tool_stack: Stack, tmp_path: Path) -> None:
    checkout = os.environ.get("OPENRESPONSES")
    if checkout is None:
        pytest.skip("left out: OPENRESPONSES=PATH names a checkout of github.com/openresponses/openresponses")
    project = nodejs.project(Path(__file__).parent / "node", tmp_path)
    for folder in ("bin", "src"):
        shutil.copytree(Path(checkout, folder), project / folder)
    command = ["-u", f"{tool_stack.gateway_url}/v1", "-k", "none", "-m", MODEL, "--json"]
    results = run_suite([nodejs.NODE, "node_modules/tsx/dist/cli.mjs", "bin/compliance-test.ts", *command], cwd=project)
    assert {name for name, result in results.items() if result["status"] == "failed"} == results.keys() & IMAGES, (
        results
    )
