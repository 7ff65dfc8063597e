"""`python -m tools.rooms docs/structure.md`: draw in that page which room of the package imports which.

`tests/test_layout.py` checks the drawing, and the same rules: imports point down, and no module is in a circle.
"""

import ast
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
GROUND = "messages, names, errors"
"""The modules in `core/penstock/` itself."""
HOUSE = {
    "core": (
        (GROUND,),
        ("redis", "grammar"),
        ("config",),
        ("telemetry",),
        ("bus", "record"),
        ("ops",),
        ("pictures",),
        ("client",),
    ),
    "kvstore": (("kvstore",),),
    "engine": (("engine",), ("engine_vllm",)),
    "worker": (("worker",), ("endpoint_worker", "embed_worker")),
    "decode_worker": (("decode_worker",),),
    "prefill_worker": (("prefill_worker",),),
    "ingest": (("ingest",),),
    "cli": (("plan", "top", "autoscale"), ("local",), ("cli",)),
    "testing": (("testing",),),
}
"""The folders that have a part of the package, from the ground up, with the floors of each.

A room imports from floors below its own. Rooms of one floor do not import each other.
"""
FLOORS = [floor for floors in HOUSE.values() for floor in floors]
PORTIONS = [ROOT / folder for folder in HOUSE]
"""These folders. Each has a folder `penstock/` without `__init__.py`."""
ENGINE_FLOORS = (
    ("counts", "drafts", "gguf", "device", "text", "pictures"),
    ("sequence", "kernels", "vectors"),
    ("contract", "memory", "weights", "sampling"),
    ("limits", "steps", "scheduling"),
    ("model", "serving"),
    ("engine", "loading"),
    ("opening", "diagnosis"),
)
"""The doors of `penstock.engine`, which are its folders and the modules in it, by floor and from the ground up."""
LAZY = {("penstock.client", f"penstock.client.{name}") for name in ("core", "sync", "aio")}
"""`penstock.client` imports its modules when somebody asks it for them."""


def module_name(file: Path) -> str:
    """Return the name under which a file of the package is imported."""
    parts = file.relative_to(ROOT).with_suffix("").parts[1:]
    return ".".join(parts).removesuffix(".__init__")


FILES = {module_name(file): file for portion in PORTIONS for file in sorted(portion.rglob("*.py"))}


def imported_modules(module: str) -> Iterator[str]:
    """Return the modules of the package that a module imports, anywhere in it."""
    for node in ast.walk(ast.parse(FILES[module].read_text("utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name in FILES else node.module for name in names]
        else:
            continue
        yield from (name for name in names if name in FILES and (module, name) not in LAZY)


def room_of(module: str) -> str:
    """Return the folder of the package in which a module lies."""
    parts = module.split(".")
    is_room = len(parts) > 1 and any((portion / "penstock" / parts[1]).is_dir() for portion in PORTIONS)
    return parts[1] if is_room else GROUND


def engine_door_of(module: str) -> str:
    """Return the folder or module of `penstock.engine` that a module is or lies in, and "" for other modules."""
    return module.split(".")[2] if module.startswith("penstock.engine.") else ""


def count_imports(find_room: Callable[[str], str] = room_of) -> Counter[tuple[str, str]]:
    """Return how many imports there are from each room to each other one."""
    ways = ((find_room(module), find_room(other)) for module in FILES for other in imported_modules(module))
    return Counter((room, other) for room, other in ways if room != other)


def list_arrows() -> dict[str, list[str]]:
    """Return the rooms that each room imports, without those that it imports through another one of them too."""
    ways = count_imports()
    imports = {room: {other for one, other in ways if one == room} for rooms in FLOORS for room in rooms}
    reached: dict[str, set[str]] = {}
    for room, found in imports.items():  # from the ground up, so what a room imports is known
        reached[room] = found.union(*(reached[other] for other in found))
    return {
        room: [other for other in imports if other in found and not any(other in reached[one] for one in found)]
        for room, found in imports.items()
    }


def make_drawing() -> str:
    """Return the rooms and their imports as a Mermaid flowchart, with a frame for each folder of several rooms."""
    lines = ["flowchart TD"]
    for folder, floors in reversed(HOUSE.items()):
        lines.append(f'    subgraph {folder}_folder ["{folder}/"]')
        rooms = [room for floor in floors for room in floor]
        lines += [f'        ground["{GROUND}"]' if room == GROUND else f'        {room}["{room}/"]' for room in rooms]
        lines.append("    end")
    for room, others in reversed(list_arrows().items()):
        if others:
            lines.append(f"    {room} --> {' & '.join(others).replace(GROUND, 'ground')}")
    return "```mermaid\n" + "\n".join(lines) + "\n```\n"


def update_page(path: Path) -> None:
    """Write the drawing over the one that the page has."""
    page = path.read_text("utf-8")
    path.write_text(re.sub(r"```mermaid\n.*?\n```\n", lambda _: make_drawing(), page, flags=re.DOTALL), "utf-8")


if __name__ == "__main__":
    update_page(Path(sys.argv[1]))
