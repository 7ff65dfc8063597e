"""The energy that this machine has used, where it tells: processors by RAPL's files, GPUs by NVML.

RAPL's files are root's, and most virtual machines have none. What is told is of the whole machine, whoever used it.
"""

import contextlib
import ctypes
import threading
from pathlib import Path
from typing import Any

RAPL_DIR = Path("/sys/class/powercap")
NVML_LIBRARY = "libnvidia-ml.so.1"


class EnergyReader:
    """Adds up what the counters of this machine have moved on since it was made. Thread-safe."""

    def __init__(self, rapl_dir: Path = RAPL_DIR) -> None:
        """Find the counters: packages of processors (`intel-rapl:0`; AMD's have the same name) and GPUs."""
        self._zones = sorted(filter(_is_package, rapl_dir.glob("intel-rapl:*")))
        self._nvml, self._gpus = _open_nvml()
        self._last = self._read_counters()
        self._joules = 0.0
        self._lock = threading.Lock()

    def read_joules(self) -> float | None:
        """Return the joules since it was made; None where the machine does not tell. Ask more often than RAPL's
        counters begin anew, which takes minutes at least.
        """
        with self._lock:
            now = self._read_counters()
            for name, (value, limit) in now.items():
                before, _ = self._last.get(name, (value, limit))
                # A GPU's counter begins anew when its driver is loaded again, wherever it was.
                begins_anew = value < before
                self._joules += value - before + (max(limit, before) if begins_anew else 0.0)
            self._last |= now
            return self._joules if self._last else None

    def _read_counters(self) -> dict[str, tuple[float, float]]:
        """Return by counter its joules, and at how many it begins anew. One that cannot be read is left out."""
        found = {}
        for zone in self._zones:
            with contextlib.suppress(OSError, ValueError):
                value, limit = (int((zone / name).read_text()) / 1e6 for name in ("energy_uj", "max_energy_range_uj"))
                found[zone.name] = value, limit
        for number, gpu in enumerate(self._gpus):
            millijoules = ctypes.c_ulonglong()
            if self._nvml.nvmlDeviceGetTotalEnergyConsumption(gpu, ctypes.byref(millijoules)) == 0:
                found[f"gpu-{number}"] = millijoules.value / 1e3, 0.0
        return found


def _is_package(zone: Path) -> bool:
    """Return whether a zone is a package of processors: no part of one, and not `psys`, the whole machine."""
    if zone.name.count(":") != 1:
        return False
    with contextlib.suppress(OSError):
        return (zone / "name").read_text().startswith("package")
    return False


def _open_nvml() -> tuple[Any, list[ctypes.c_void_p]]:
    """Return NVML and the handles of all GPUs; none where it is not installed."""
    try:
        nvml, count = ctypes.CDLL(NVML_LIBRARY), ctypes.c_uint()
    except OSError:
        return None, []
    if nvml.nvmlInit_v2() or nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)):
        return nvml, []
    handles = [ctypes.c_void_p() for _ in range(count.value)]
    named = [nvml.nvmlDeviceGetHandleByIndex_v2(number, ctypes.byref(one)) for number, one in enumerate(handles)]
    return nvml, [one for one, status in zip(handles, named, strict=True) if status == 0]
