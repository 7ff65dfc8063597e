"""Whether containers can be started here."""

import contextlib
import os
import socket
from importlib.util import find_spec


def is_container_engine_running() -> bool:
    """Return whether containers can be started here: `testcontainers` is installed and an engine answers a ping."""
    if find_spec("testcontainers") is None:
        return False
    kind, _, where = os.environ.get("DOCKER_HOST", "unix:///var/run/docker.sock").partition("://")
    host, _, port = where.partition(":")
    with contextlib.suppress(OSError, ValueError), contextlib.ExitStack() as stack:
        if kind == "unix":
            engine = stack.enter_context(socket.socket(socket.AF_UNIX))
            engine.settimeout(2.0)
            engine.connect(where)
        else:
            engine = stack.enter_context(socket.create_connection((host, int(port)), 2.0))
        engine.sendall(b"GET /_ping HTTP/1.0\r\nHost: engine\r\n\r\n")
        return b" 200 " in engine.recv(64)
    return False
