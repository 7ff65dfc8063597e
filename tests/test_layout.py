"""Imports point one way, and the client needs no model library."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parents[1]
OURS = {"penstock", "ingest", "prefill_worker", "decode_worker", "kvstore", "engine"}
MAY_IMPORT = {
    "penstock": set[str](),
    "kvstore": {"penstock"},
    "engine": {"penstock"},
    "ingest": {"penstock", "engine", "kvstore"},
    "prefill_worker": {"penstock", "engine", "kvstore"},
    "decode_worker": {"penstock", "engine", "kvstore"},
}

WORKER_RUNTIME = {"engine", "kvstore"}
"""`penstock.worker` stands above these; what its package names is imported without them."""


def imported(file: Path) -> set[str]:
    """Top-level names of all modules a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module.split(".")[0])
    return found


@pytest.mark.parametrize("package", sorted(MAY_IMPORT))
def test_imports_point_one_way(package: str) -> None:
    for file in (HERE / package).rglob("*.py"):
        if "cli" in file.relative_to(HERE).parts:
            continue
        others = imported(file) & OURS - {package}
        is_runtime = file.is_relative_to(HERE / "penstock" / "worker")
        assert others <= MAY_IMPORT[package] | (WORKER_RUNTIME if is_runtime else set()), file.relative_to(HERE)


@pytest.mark.parametrize(
    "module", ["penstock.client", "penstock.aio", "penstock.cli.main", "penstock.bus.kafka", "penstock.worker"]
)
def test_the_client_needs_no_model_library(module: str) -> None:
    code = f"import {module}, sys; print(sorted({{'torch', 'transformers', 'numpy'}} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=HERE, check=True, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.strip() == "[]"
