"""The wheel's build compiles what is native, where there is a compiler: the kernels, and the copying of KV blocks."""

import importlib
import subprocess
import sys
import sysconfig
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

FOLDERS = ("core", "kvstore", "engine")
"""Where the modules that compile lie."""
NATIVE = ("penstock.engine.kernels.build", "penstock.kvstore.native.build")


class NativeKernels(BuildHookInterface[Any]):
    """Without a compiler the wheel has no native code, fits every platform, and works without it."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile in place; an editable installation uses what lies there, a wheel carries it."""
        sys.path[:0] = [f"{self.root}/{folder}" for folder in FOLDERS]
        for module in map(importlib.import_module, NATIVE):
            try:
                module.build_library()
            except (OSError, subprocess.CalledProcessError) as error:
                module.LIBRARY.unlink(missing_ok=True)  # it may be of other sources
                why = getattr(error, "stderr", "") or f"no C++ compiler: {error}"
                self.app.display_warning(f"{module.__name__} does not compile and is left out: {why}")
                continue
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"
