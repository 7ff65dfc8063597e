"""Install packages from npm and the frameworks' environments for `make test-clients`."""

import subprocess
import sys
from pathlib import Path

from tests.ingest import nodejs

HERE = Path(__file__).parent
UV = str(Path(sys.executable).parent / "uv")

if __name__ == "__main__":
    for package in (HERE / "node", HERE.parents[1] / "examples" / "backend_node"):
        nodejs.install(package / "package.json")
    for script in sorted((HERE / "frameworks").glob("*.py")):
        subprocess.run([UV, "sync", "--quiet", "--python", sys.executable, "--script", str(script)], check=True)
