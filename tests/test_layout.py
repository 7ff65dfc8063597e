"""Imports point down, and the client needs no model library."""

import ast
import re
import subprocess
import sys
import tomllib
from collections import Counter
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import penstock
from tests.conftest import PROOF
from tools.rooms import (
    ENGINE_FLOORS,
    FILES,
    FLOORS,
    HOUSE,
    PORTIONS,
    count_imports,
    engine_door_of,
    imported_modules,
    make_drawing,
    room_of,
)

HERE = Path(__file__).parents[1]
INGEST = ("http", "streaming", "gateway", "main")
"""Parts of `penstock.ingest` in their order; none of the others imports one of them."""


def test_rooms_import_from_floors_below_them() -> None:
    level = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
    assert {(room, other) for room, other in count_imports() if level[room] <= level[other]} == set()


def test_folders_import_from_folders_below_them() -> None:
    level = {room: number for number, floors in enumerate(HOUSE.values()) for floor in floors for room in floor}
    assert {(room, other) for room, other in count_imports() if level[room] < level[other]} == set()


MAX_FILES_OF_A_ROOM = 12
"""Of an engine's room, beside `__init__.py`."""


def test_doors_of_the_engine_import_from_floors_below_them() -> None:
    level = {door: number for number, doors in enumerate(ENGINE_FLOORS) for door in doors}
    ways = {way for way in count_imports(engine_door_of) if all(way)}
    assert {(door, other) for door, other in ways if level[door] <= level[other]} == set()
    modules = [module for module in FILES if engine_door_of(module)]
    assert {engine_door_of(module) for module in modules} == level.keys()
    files = Counter(engine_door_of(module) for module in modules if FILES[module].name != "__init__.py")
    assert {door: num for door, num in files.items() if num > MAX_FILES_OF_A_ROOM} == {}
    page = (HERE / "engine" / "README.md").read_text("utf-8")
    rows = [(number, re.findall(r"`(\w+)", cell)) for number, cell in re.findall(r"^\| (\d) \| (.*?) \|", page, re.M)]
    assert {door: int(number) - 1 for number, doors in rows for door in doors} == level


ENGINE_FOR_ALL = (
    "contract",
    "sequence",
    "vectors",
    "limits",
    "opening",
    "pictures",
    "text",
    "weights.files",
    "loading.vector_files",
)
ENGINE_FOR = {"plan": ("scheduling", "memory.pool"), "cli": ("diagnosis",)}
"""Modules and folders of the engine that a room may import too: plan simulates the engine with its real scheduler."""


def test_the_pipeline_imports_these_parts_of_the_engine() -> None:
    found = {(module, other) for module in FILES for other in imported_modules(module) if engine_door_of(other)}
    outside = [(module, other) for module, other in found if not room_of(module).startswith("engine")]
    assert len(outside) > len(ENGINE_FOR_ALL)
    for module, other in outside:
        allowed = [f"penstock.engine.{name}." for name in ENGINE_FOR_ALL + ENGINE_FOR.get(room_of(module), ())]
        assert f"{other}.".startswith(tuple(allowed)), f"{module} imports {other}"


def test_the_page_draws_these_imports_and_has_a_row_for_each_room() -> None:
    page = (HERE / "docs" / "structure.md").read_text("utf-8")
    assert make_drawing() in page, "run: python -m tools.rooms docs/structure.md"
    rows = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `")]
    assert not [room for rooms in FLOORS[1:] for room in rooms if not any(f"`{room}/`" in row for row in rows)]


def test_endpoints_as_data_know_neither_http_nor_batches() -> None:
    modules = [module for module in FILES if module.startswith("penstock.ingest.openai")]
    imported = {other.split(".")[2] for module in modules for other in imported_modules(module) if ".ingest." in other}
    assert not imported & {"batch", *INGEST}


def test_http_knows_no_stream_and_streams_know_no_gateway() -> None:
    def find_floor(module: str) -> int:
        part = module.split(".")[2]
        return INGEST.index(part) + 1 if part in INGEST else 0

    modules = [module for module in FILES if module.startswith("penstock.ingest.")]
    pairs = ((one, other) for one in modules for other in imported_modules(one) if other in modules)
    assert {pair for pair in pairs if find_floor(pair[0]) < find_floor(pair[1])} == set()


def test_the_package_lies_in_these_folders_and_nowhere_else() -> None:
    """Another one, or a regular package, would be what an older checkout or installation has left."""
    assert sorted(penstock.__path__) == sorted(str(portion / "penstock") for portion in PORTIONS)
    assert not any((portion / "penstock" / "__init__.py").exists() for portion in PORTIONS)
    folders, tool = [portion.name for portion in PORTIONS], tomllib.loads((HERE / "pyproject.toml").read_text())["tool"]
    assert folders == tool["mypy"]["mypy_path"] == tool["pyright"]["extraPaths"]


def test_no_module_is_in_a_circle() -> None:
    TopologicalSorter({module: set(imported_modules(module)) - {module} for module in FILES}).prepare()


@pytest.mark.parametrize(
    ("folder", "above"),
    [
        *((portion.name, {"tools", "sim", "tests", "benchmarks"}) for portion in PORTIONS),
        ("tools", {"sim", "tests", "benchmarks"}),
        ("sim", {"tests", "benchmarks"}),
    ],
)
def test_a_folder_knows_nothing_of_those_that_use_it(folder: str, above: set[str]) -> None:
    for file in (HERE / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module:
                assert node.module.split(".")[0] not in above, file


def test_settings_are_read_where_programs_begin() -> None:
    """By commands and workers' processes, and by what other programs open."""
    readers = {name for name, file in FILES.items() if "load_settings" in file.read_text("utf-8")}
    others = {name for name in readers if not name.startswith(("penstock.cli.", "penstock.config."))}
    assert others == {
        "penstock.client.core",
        "penstock.ingest.main",
        "penstock.local.stack",
        "penstock.worker.process",
    }


@pytest.mark.parametrize(
    ("module", "without"),
    [
        ("penstock.client.sync", ("torch", "transformers", "numpy", "penstock.local")),
        ("penstock.client.aio", ("torch", "transformers", "numpy", "penstock.local")),
        ("penstock.bus.kafka.bus", ("torch", "transformers", "numpy", "penstock.local")),
        ("penstock.worker.failure", ("torch", "transformers", "numpy", "penstock.local")),
        ("penstock.worker.loop", ("torch", "transformers", "numpy", "penstock.local")),
        ("penstock.worker.worker", ("torch", "transformers", "numpy", "llguidance", "penstock.local")),
        ("penstock.endpoint_worker.main", ("torch", "transformers", "numpy", "llguidance", "penstock.local")),
        ("penstock.embed_worker.main", ("torch", "transformers", "numpy", "llguidance", "penstock.local")),
        ("penstock.prefill_worker.role", ("torch", "transformers", "penstock.local")),
        ("penstock.decode_worker.role", ("torch", "transformers", "penstock.local")),
        ("penstock.cli.main", ("torch", "transformers", "numpy")),
        ("penstock.cli.worker", ("penstock.local",)),
        ("penstock.cli.up", ("torch", "transformers", "numpy")),
        ("penstock.ingest.main", ("torch", "transformers", "penstock.local")),
    ],
)
def test_what_is_not_needed_is_not_imported(module: str, without: tuple[str, ...]) -> None:
    code = f"import {module}, sys; print(sorted(set({without!r}) & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=HERE, check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "[]"


DEVELOPERS = ("tools", "benchmarks", "sim.placement", "sim.protocol", "sim.scenes", "sim.world")
MAKERS = {"tools.compatibility", "tools.handover", "tools.tiny"}
"""Modules that make small models, and carry KV from one engine to another."""


def is_proof(file: Path, test: str) -> bool:
    """Return whether `make test` runs the test, with some of its parameters at least."""
    for node in ast.parse(file.read_text("utf-8")).body:
        if isinstance(node, ast.Assign) and re.match(rf"pytestmark = .*{PROOF}", ast.unparse(node)):
            return True
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == test:
            return any(PROOF in ast.unparse(one) for one in node.decorator_list)
    return False


def test_make_test_proves_each_promise() -> None:
    rows = re.findall(r"^\| \*\*.*", (HERE / "README.md").read_text("utf-8"), re.MULTILINE)
    assert len(rows) > 7
    for row in rows:
        assert any(is_proof(HERE / path, test) for test, path in re.findall(r"\[`(test_\w+)`\]\(([^)]+)\)", row)), row


def test_make_test_tests_no_developers_tool() -> None:
    proofs = {file: text for file in (HERE / "tests").rglob("test_*.py") if PROOF in (text := file.read_text("utf-8"))}
    assert len(proofs) > 100
    for file, text in proofs.items():
        imported = {node.module or "" for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom)}
        assert not {name for name in imported if name.startswith(DEVELOPERS)} - MAKERS, file
