"""The deployment files, as the programs that they are for read them."""

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from penstock.config.settings import SETTINGS_CLASSES, check_environment, load_settings
from penstock.errors import DependencyMissing
from sim.servers import start_or_skip

HERE = Path(__file__).parents[2]
DOCKER = HERE / "docker"
GIVEN = {"REDIS_PASSWORD": "ab12", "KV_SALT_SECRET": "cd34", "GRAFANA_PASSWORD": "ef56"}
"""What a user has in .env."""


def program(name: str, package: str) -> str:
    """Where a program is. Without it the test is skipped; in CI it fails."""

    def find() -> str:
        found = shutil.which(name) or shutil.which(name, path=str(Path(sys.executable).parent))
        if found is None:
            raise DependencyMissing(f"no {name}: {package} brings it")
        return found

    return start_or_skip(find)


def run(*command: str | Path) -> None:
    """Run a checker in the repository; what it says is shown if it finds something."""
    done = subprocess.run(command, cwd=HERE, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def compose(given: Mapping[str, str] = GIVEN) -> dict[str, Any]:
    """The compose file with its variables filled in. Raises `KeyError` for one that has to be given and is not."""

    def value(found: re.Match[str]) -> str:
        if found["name"] is None:
            return "$"
        if found["how"] == ":-":
            return given.get(found["name"], found["rest"])
        return given[found["name"]]

    text = (DOCKER / "compose.yaml").read_text()
    filled = re.sub(r"\$(?:\$|\{(?P<name>\w+)(?:(?P<how>:-|:\?)(?P<rest>[^}]*))?\})", value, text)
    loaded: dict[str, Any] = yaml.safe_load(filled)
    return loaded


def manifests() -> Iterator[tuple[str, dict[str, Any]]]:
    """Every Kubernetes object, with the name of its file; not what is kustomize's own."""
    for file in sorted((DOCKER / "kubernetes").glob("*.yaml")):
        if file.name != "kustomization.yaml":
            for document in yaml.safe_load_all(file.read_text()):
                yield file.name, document


def manifest(kind: str, name: str) -> dict[str, Any]:
    """One of them."""
    (found,) = (one for _, one in manifests() if one["kind"] == kind and one["metadata"]["name"] == name)
    return found


def check_settings(environment: Mapping[str, object], patched: pytest.MonkeyPatch) -> None:
    """Every `PENSTOCK_` variable is a setting, with a value that it can have. Raises `SettingsError`."""
    ours = {name: str(value) for name, value in environment.items() if name.startswith("PENSTOCK_")}
    assert ours
    check_environment(ours)
    with patched.context() as scope:
        for name, value in ours.items():
            scope.setenv(name, value)
        for part in SETTINGS_CLASSES:
            load_settings(part)


def seconds(text: str) -> float:
    """A duration of a compose file, in whole seconds."""
    assert re.fullmatch(r"\d+s", text)
    return float(text.removesuffix("s"))


def megabytes(text: str) -> int:
    """A size as Redis, tmpfs and Kubernetes write it."""
    found = re.fullmatch(r"(\d+)(mb?|Mi|Gi)", text)
    assert found, text
    return int(found[1]) * (1024 if found[2] == "Gi" else 1)
