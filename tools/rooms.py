"""`python -m tools.rooms docs/plots/rooms.svg`: draw which room of the package imports which, floor above floor.

`tests/test_layout.py` checks the same rules: imports point down, and no module is in a circle.
"""

import ast
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PORTIONS = [ROOT / folder for folder in ("core", "ingest", "prefill_worker", "decode_worker", "kvstore")]
"""The folders that have a part of the package, each in a `penstock/` without `__init__.py`."""
GROUND = "messages, names, errors"
"""The modules in `core/penstock/` itself."""
FLOORS = (
    (GROUND,),
    ("redis", "grammar"),
    ("config",),
    ("telemetry",),
    ("bus", "record", "kvstore"),
    ("engine",),
    ("engine_vllm",),
    ("ops",),
    ("client",),
    ("worker",),
    ("prefill_worker", "decode_worker", "endpoint_worker"),
    ("ingest", "plan", "top"),
    ("local",),
    ("cli",),
)
"""From the ground up. A room imports from floors below its own; rooms of one floor do not know each other."""
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


def count_imports() -> Counter[tuple[str, str]]:
    """Return how many imports there are from each room to each other one."""
    ways = ((room_of(module), room_of(other)) for module in FILES for other in imported_modules(module))
    return Counter((room, other) for room, other in ways if room != other)


def draw(path: Path) -> None:
    """Draw the floors, with an arrow for each room that another one imports; the ground floor is imported by all."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    places = {
        # Floors with one room stand to the left and to the right in turn, so that no arrow runs behind a room.
        room: ((number + 0.5) / len(rooms) if len(rooms) > 1 else 0.4 + 0.2 * (level % 2), level)
        for level, rooms in enumerate(FLOORS)
        for number, room in enumerate(rooms)
    }
    figure, axes = pyplot.subplots(figsize=(9, 9))
    for (room, other), count in count_imports().items():
        if other == GROUND:
            continue
        (x0, y0), (x1, y1) = places[room], places[other]
        bend = 0.15 if y0 - y1 > 1 and abs(x0 - x1) < 0.2 else 0.0
        axes.annotate(
            "",
            (x1, y1 + 0.2),
            (x0, y0 - 0.2),
            arrowprops={
                "arrowstyle": "->",
                "color": "tab:red" if y1 >= y0 else "tab:gray" if room == "cli" else "tab:blue",
                "alpha": 0.25 if room == "cli" else 0.6,
                "linewidth": 0.5 + min(count, 30) / 12,
                "connectionstyle": f"arc3,rad={bend}",
            },
        )
    for room, (x, y) in places.items():
        axes.text(x, y, room, ha="center", va="center", bbox={"boxstyle": "round", "facecolor": "white"})
    axes.set_xlim(0, 1)
    axes.set_ylim(-0.6, len(FLOORS) - 0.4)
    axes.axis("off")
    axes.set_title(
        "Which room imports which: wider for more imports, pale for the command line; all import the ground floor"
    )
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    draw(Path(sys.argv[1]))
