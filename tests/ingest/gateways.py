"""Gateways that tests start for themselves, each a process of its own."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

import httpx

from penstock.config.addresses import Addresses
from penstock.local.processes import find_free_port
from penstock.waiting import wait_until
from sim.forked import fork_process, run_penstock


class GatewayProcess:
    """A gateway that answers; ended by `with`, unless it was killed."""

    def __init__(
        self,
        addresses: Addresses,
        folder: Path,
        settings: Mapping[str, str] = MappingProxyType({}),
        main: Callable[..., None] = run_penstock,
    ) -> None:
        """Start it. Settings are named without `PENSTOCK_`; its log lies in the folder."""
        self.port = find_free_port()
        self.address, self.url = f"127.0.0.1:{self.port}", f"http://127.0.0.1:{self.port}"
        own = {"STREAM_URL": addresses.stream_url, "PIPELINE": addresses.pipeline, **settings}
        environment = os.environ | {f"PENSTOCK_{name}": value for name, value in own.items()}
        arguments = ("gateway", "--port", str(self.port))
        self.log = folder / f"gateway-{self.port}.log"
        self.process = fork_process("gateway", self.log, main, *arguments, environment=environment)
        wait_until(lambda: not self.process.is_alive() or self.is_ready(), 60, "the gateway is ready", every_s=0.05)
        assert self.process.is_alive(), self.process.read_log_tail()

    def is_ready(self) -> bool:
        try:
            return httpx.get(f"{self.url}/readyz", timeout=2).status_code == 200
        except httpx.TransportError:
            return False

    def __enter__(self) -> "GatewayProcess":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.stop(20)
