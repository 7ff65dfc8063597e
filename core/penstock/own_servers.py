"""The servers of this project's own processes: the port they listen on, and how other processes of ours ask them."""

import errno
import logging
import socket
import time
from http.client import HTTPResponse
from typing import Any
from urllib.request import ProxyHandler, build_opener

log = logging.getLogger(__name__)

PORT_PATIENCE_S = 150.0
"""How long a server waits for its port while nobody listens on it. The system keeps it 60 s after a client left."""
_ALL_ADDRESSES = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}
"""What servers that listen on all addresses are asked at, by what they listen on."""


def format_place(host: str, port: int | str) -> str:
    """Return host and port as text; an IPv6 address is in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def find_own_url(host: str, port: int | None) -> str:
    """Return the url at which this machine reaches a server that listens on a host."""
    return f"http://{format_place(_ALL_ADDRESSES.get(host, host), port or 0)}"


def ask_own(url: str, body: bytes | None = None, timeout_s: float = 60.0) -> HTTPResponse:
    """Send a request to one of our own servers, by no proxy. Raises `OSError`, also for an answer that is an error."""
    answer: Any = build_opener(ProxyHandler({})).open(url, body, timeout_s)
    return answer  # type: ignore[no-any-return]


def bind_port(host: str, port: int) -> None:
    """Take a port for listening, and give it back. Raises `OSError` if that is not possible now."""
    is_six = ":" in host
    with socket.socket(socket.AF_INET6 if is_six else socket.AF_INET) as probe:
        if is_six:
            probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((host, port))


def has_listener(host: str, port: int) -> bool:
    """Return whether a server listens on a port, as far as that is known within a second."""
    try:
        with socket.create_connection((_ALL_ADDRESSES.get(host, host), port), 1.0) as client:
            return bool(client.getsockname() != client.getpeername())
    except ConnectionRefusedError:
        return False
    except OSError:
        return True


def wait_until_free(host: str, port: int) -> None:
    """Wait for a port that is taken though nobody listens on it, for `PORT_PATIENCE_S` at most, and say so.

    A client of this machine that connects again and again to a port on which nobody listens is given the same port for
    its own end sooner or later, where it is among the outgoing ones, and is then connected with itself.
    """
    until_s, is_told = time.monotonic() + PORT_PATIENCE_S, False
    while time.monotonic() < until_s:
        try:
            return bind_port(host, port)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or has_listener(host, port):
                return None  # whoever binds it is told
        if not is_told:
            is_told = True
            log.warning(
                f"port {port} is taken though nobody listens on it, as a connection goes out from it: waiting for "
                f"{PORT_PATIENCE_S:.0f} s at most. Ports below net.ipv4.ip_local_port_range are not taken like that"
            )
        time.sleep(0.1)
    return None
