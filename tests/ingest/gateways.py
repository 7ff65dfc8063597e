"""Gateways that tests start for themselves."""

import httpx

from penstock.local.processes import Child
from penstock.waiting import wait_until


def wait_until_ready(child: Child, port: int) -> None:
    """Until it answers; fails with the end of its log if it ends instead."""
    wait_until(lambda: not child.is_alive() or _is_ready(port), 60, f"{child.name} is ready", every_s=0.05)
    assert child.is_alive(), child.read_log_tail()


def _is_ready(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/readyz", timeout=2).status_code == 200
    except httpx.TransportError:
        return False
