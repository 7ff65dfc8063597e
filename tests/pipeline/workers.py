"""Workers as processes that a test starts one after the other, and lets kill themselves."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType

from penstock.config.addresses import Addresses
from penstock.local.processes import Child
from penstock.names import Stage
from sim.forked import fork_process, run_penstock


@contextmanager
def worker_process(
    stage: Stage,
    addresses: Addresses,
    directory: Path,
    failpoints: str = "",
    settings: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[Child]:
    """Run `penstock worker` in a process that passes its failpoints; it is killed at the end.

    Settings are named without `PENSTOCK_`.
    """
    own = {
        "PIPELINE": addresses.pipeline,
        "STREAM_URL": addresses.stream_url,
        "RECORD_LEASE_S": "0.5",
        "RECORD_MAX_ATTEMPTS": "1000",
        "ENGINE_DTYPE": "float32",
        "KV_STORE_SHARED_MB": "0",
        "FAILPOINTS": failpoints,
        **settings,
    }
    environment = os.environ | {f"PENSTOCK_{name}": value for name, value in own.items()}
    child = fork_process(stage, directory / f"{stage}.log", run_penstock, "worker", stage, environment=environment)
    try:
        yield child
    finally:
        child.kill()
