"""Install packages from npm and the frameworks' environments for `make test-clients`.

With `NEWEST` in the environment their newest releases take the places of the versions that are written down: those of
the SDKs in this environment, and of the packages that copies of the scripts and of package.json name.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

from tests.ingest import nodejs

HERE, ROOT = Path(__file__).parent, Path(__file__).parents[2]
UV = str(Path(sys.executable).parent / "uv")
NEWEST = ROOT / ".cache" / "newest" if os.environ.get("NEWEST") else None
NODE_FOLDERS = (HERE / "node", HERE / "agent_programs")
"""The folders of SDKs and of coding agents from npm."""
SDKS = ("openai",)
"""SDKs that other tests need as well, beside those of the extra `clients`."""
_VERSION = re.compile(r"\s*[<>=!~].*")


def find_place(path: Path) -> Path:
    """Return a script, or a folder with a package.json; with `NEWEST` its copy that names no versions or the newest."""
    return path if NEWEST is None else NEWEST / path.name


def strip_versions(script: str) -> str:
    """Return a script whose dependencies have no versions."""
    line = re.search(r"^# dependencies = (\[.*\])$", script, re.MULTILINE)
    assert line is not None, "each script names its packages in one line"
    names = [_VERSION.sub("", one) for one in json.loads(line[1])]
    return script.replace(line[1], json.dumps(names))


def run_script(script: Path, *args: str) -> str:
    """Run a script in its own environment, which has been installed, and return what it prints."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    command = [
        UV,
        "run",
        "--offline",
        "--quiet",
        "--python",
        sys.executable,
        "--script",
        str(find_place(script)),
        *args,
    ]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def write_newest(place: Path) -> None:
    """Write the copies, and install the newest SDKs."""
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    sdks = [*SDKS, *(_VERSION.sub("", one) for one in extras["clients"])]
    subprocess.run([UV, "pip", "install", "--quiet", "--python", sys.executable, "--upgrade", *sdks], check=True)
    for script in (HERE / "frameworks").glob("*.py"):
        (place / script.name).write_text(strip_versions(script.read_text()))
    for folder in NODE_FOLDERS:
        copy = shutil.copytree(folder, place / folder.name, ignore=shutil.ignore_patterns("node_modules"))
        package = json.loads((copy / "package.json").read_text())
        package["dependencies"] = {name: nodejs.find_newest(name) for name in package["dependencies"]}
        (copy / "package.json").write_text(json.dumps(package))
        sys.stdout.writelines(f"newest: {name} {version}\n" for name, version in package["dependencies"].items())


if __name__ == "__main__":
    if NEWEST is not None:
        write_newest(NEWEST)
    examples = ROOT / "examples" / "backend_node", ROOT / "examples" / "conformance" / "node"
    for folder in (*map(find_place, NODE_FOLDERS), *examples):
        nodejs.install(folder / "package.json")
    for script in sorted((HERE / "frameworks").glob("*.py")):
        command = [UV, "sync", "--quiet", "--python", sys.executable, "--script", str(find_place(script))]
        subprocess.run([*command, *(["--upgrade"] if NEWEST else [])], check=True)
