"""The wheel's build compiles the engine's native kernels, where there is a compiler."""

import importlib.util
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class NativeKernels(BuildHookInterface[Any]):
    """Without a compiler the wheel has no kernels, fits every platform, and the engine runs on torch alone."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile in place; an editable installation uses what lies there, a wheel carries it."""
        spec = importlib.util.spec_from_file_location("build", Path(self.root) / "engine" / "kernels" / "build.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        module.LIBRARY.unlink(missing_ok=True)
        try:
            module.build()
        except OSError as error:
            self.app.display_warning(f"no C++ compiler, the engine will run without native kernels: {error}")
            return
        except subprocess.CalledProcessError as error:
            self.app.display_warning(f"the native kernels do not compile, the engine will run without: {error.stderr}")
            return
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"
