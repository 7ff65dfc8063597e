"""The servers of this project's own processes: the port they listen on, and how other processes of ours ask them."""

import errno
import logging
import socket
import time
from collections.abc import Callable
from typing import Any
from urllib.request import ProxyHandler, build_opener

log = logging.getLogger(__name__)

PORT_PATIENCE_S = 150.0
"""Seconds that a server waits for its port while nobody listens on it. The system keeps it 60 s after a client left."""
TAKEN_BY_CLIENT = "is taken by a connection that goes out from it"
_ALL_ADDRESSES = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}
"""The address to ask a server at that listens on all addresses, by the address that it listens on."""


def format_place(host: str, port: int | str) -> str:
    """Return host and port as text; an IPv6 address is in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def find_own_url(host: str, port: int | None) -> str:
    """Return the url at which this machine reaches a server that listens on a host."""
    return f"http://{format_place(_ALL_ADDRESSES.get(host, host), port or 0)}"


def ask_own(url: str, body: bytes | None = None, timeout_s: float = 60.0) -> Any:
    """Return an `HTTPResponse` of one of our own servers, asked by no proxy. Raises `OSError`, also for an error's."""
    return build_opener(ProxyHandler({})).open(url, body, timeout_s)


def describe_port_problem(host: str, port: int) -> str:
    """Return why nobody can listen on a TCP port now; empty if it is free."""
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:  # nobody is accepted by it
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if probe.family == socket.AF_INET6:
                probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            probe.bind((host, port))
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            return f"cannot be used on {host} ({error.strerror})"
        return "is taken" if has_listener(host, port) else TAKEN_BY_CLIENT
    return ""


def has_listener(host: str, port: int) -> bool:
    """Return whether a server listens on a port, as far as that is known within a second."""
    try:
        with socket.create_connection((_ALL_ADDRESSES.get(host, host), port), 1.0) as client:
            return bool(client.getsockname() != client.getpeername())
    except ConnectionRefusedError:
        return False
    except OSError:
        return True


def wait_until_free(host: str, port: int, stop_asked: Callable[[], object] = lambda: False) -> None:
    """Wait for a port that is taken though nobody listens on it, for `PORT_PATIENCE_S` at most, and say so. Return at
    once where `stop_asked()` is true.

    A client of this machine may connect again and again to a port on which nobody listens. If the port is in the range
    for outgoing connections, the client sooner or later gets it for its own end, and is connected with itself.
    """
    until_s = 0.0
    while not stop_asked() and describe_port_problem(host, port) == TAKEN_BY_CLIENT:
        if 0 < until_s < time.monotonic():
            break
        if not until_s:
            until_s = time.monotonic() + PORT_PATIENCE_S
            log.warning(
                f"port {port} is taken though nobody listens on it: it is the source port of an outgoing connection. "
                f"Waiting up to {PORT_PATIENCE_S:.0f} s. Ports below net.ipv4.ip_local_port_range avoid this"
            )
        time.sleep(0.1)
