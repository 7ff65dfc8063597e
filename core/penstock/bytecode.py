"""Bytecode of packages that Python would compile again at each start: torch and transformers take longest."""

import importlib.util
import logging
import os
import sys
from pathlib import Path

log = logging.getLogger(__name__)

PACKAGES = ("torch", "transformers")


def describe_lost_bytecode(cache: Path) -> str:
    """Return advice if the packages have no bytecode, and the cache has none yet; empty otherwise."""
    if not is_bytecode_lost() or (cache / "bytecode").is_dir():
        return ""
    why = "PYTHONDONTWRITEBYTECODE is set" if sys.dont_write_bytecode else "their directory cannot be written to"
    return (
        f"{' and '.join(PACKAGES)} have no bytecode, and {why}: this start takes twice the processor time, and so does "
        f"each later one if {cache} is deleted. Run `python -m compileall` where the packages are installed"
    )


def keep_bytecode(cache: Path) -> None:
    """Keep the bytecode of later imports in a cache, if Python would keep none beside the sources.

    Many images set PYTHONDONTWRITEBYTECODE, or have packages of another user that nobody compiled. Bytecode that lies
    beside its source is still used.
    """
    if line := describe_lost_bytecode(cache):
        log.warning(line)
    if is_bytecode_lost():
        sys.pycache_prefix, sys.dont_write_bytecode = str(cache / "bytecode"), False


def is_bytecode_lost() -> bool:
    """Return whether one of the packages is not compiled, and would not be by being imported."""
    specs = [importlib.util.find_spec(package) for package in PACKAGES]
    missing = [path for spec in specs if spec and spec.cached and not (path := Path(spec.cached)).is_file()]
    is_closed = not sys.pycache_prefix and not all(os.access(path.parents[1], os.W_OK) for path in missing)
    return bool(missing) and (sys.dont_write_bytecode or is_closed)
