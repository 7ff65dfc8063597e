"""Imports point down, and the client needs no model library."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

HERE = Path(__file__).parents[1]
FLOORS = (
    ("the ground floor",),  # modules in `penstock/` itself
    ("redis",),
    ("config",),
    ("telemetry",),
    ("bus", "record", "engine", "kvstore"),
    ("ops",),
    ("client",),
    ("worker",),
    ("prefill_worker", "decode_worker"),
    ("ingest", "plan", "top"),
    ("local",),
    ("cli",),
)
"""A room imports from floors below its own; two rooms of a floor do not know each other."""
LEVEL = {room: level for level, rooms in enumerate(FLOORS) for room in rooms}
LAZY = {("penstock", "penstock.client.sync"), ("penstock", "penstock.client.aio")}
"""`from penstock import Client` is the door."""


def name_of(file: Path) -> str:
    return ".".join(file.relative_to(HERE).with_suffix("").parts).removesuffix(".__init__")


FILES = {name_of(file): file for file in sorted((HERE / "penstock").rglob("*.py"))}


def imported(module: str) -> Iterator[str]:
    """Modules of the package that a module imports, anywhere in it."""
    for node in ast.walk(ast.parse(FILES[module].read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name in FILES else node.module for name in names]
        else:
            continue
        yield from (name for name in names if name in FILES and (module, name) not in LAZY)


def room_of(module: str) -> str:
    parts = module.split(".")
    is_room = len(parts) > 1 and (HERE / "penstock" / parts[1]).is_dir()
    return parts[1] if is_room else "the ground floor"


def test_rooms_import_from_floors_below_them() -> None:
    ways = {(room_of(module), room_of(other)) for module in FILES for other in imported(module)}
    assert {(room, other) for room, other in ways if room != other and LEVEL[room] <= LEVEL[other]} == set()


def test_no_module_is_in_a_circle() -> None:
    TopologicalSorter({module: set(imported(module)) - {module} for module in FILES}).prepare()


def test_the_package_knows_nothing_of_tools_and_tests() -> None:
    outside = {"tools", "sim", "tests", "benchmarks"}
    for file in FILES.values():
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module:
                assert node.module.split(".")[0] not in outside, file


@pytest.mark.parametrize(
    "module",
    ["penstock.client.sync", "penstock.client.aio", "penstock.cli.main", "penstock.bus.kafka.bus", "penstock.worker"],
)
def test_the_client_needs_no_model_library(module: str) -> None:
    code = f"import {module}, sys; print(sorted({{'torch', 'transformers', 'numpy'}} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=HERE, check=True, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("module", ["penstock.client.sync", "penstock.cli.worker", "penstock.ingest.gateway.server"])
def test_development_servers_are_imported_only_by_who_starts_them(module: str) -> None:
    code = f"import {module}, sys; print([name for name in sys.modules if name.startswith('penstock.local')])"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=HERE, check=True, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.strip() == "[]"
