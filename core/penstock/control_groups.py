"""The control groups that this process is in, where the system keeps its limits: those of a container or a unit."""

from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple


class ControlGroup(NamedTuple):
    """A control group, with the directory of its files."""

    path: PurePosixPath
    """Its place in the tree of its controller."""
    directory: Path
    is_first_version: bool


def iter_groups(controller: str, root: Path = Path("/")) -> Iterator[ControlGroup]:
    """Yield the groups whose limits a controller holds this process to: its own and its parents, of both versions.

    A container may see only its own as the top. Nothing is yielded where the system has no control groups.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, own = line.split(":", 2)
        if not controllers or controller in controllers.split(","):
            base, path = root / "sys/fs/cgroup" / (controller if controllers else ""), PurePosixPath(own)
            for group in (path, *path.parents):
                yield ControlGroup(group, base / str(group).lstrip("/"), bool(controllers))
