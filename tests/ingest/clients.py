"""Install packages from npm and the frameworks' environments for `make test-clients`.

With `newest` the newest coding agents are installed, and nothing else: for `make test-agents`.
"""

import subprocess
import sys
from pathlib import Path

from tests.ingest import nodejs

HERE = Path(__file__).parent
UV = str(Path(sys.executable).parent / "uv")


def install_all() -> None:
    """Install all packages at the versions that are named in files of this repository."""
    packages = [HERE / "node" / "package.json", HERE.parents[1] / "examples" / "backend_node" / "package.json"]
    for package in [*packages, nodejs.AGENTS]:
        nodejs.install(package)
    for script in sorted((HERE / "frameworks").glob("*.py")):
        subprocess.run([UV, "sync", "--quiet", "--python", sys.executable, "--script", str(script)], check=True)


if __name__ == "__main__":
    if sys.argv[1:] == ["newest"]:
        for name, version in nodejs.install_newest_agents().items():
            sys.stdout.write(f"newest: {name} {version}\n")
    else:
        install_all()
