"""A process with an app on uvicorn, and how it stops.

    1  SIGTERM or SIGINT: it stops listening, `/readyz` answers 503, idle connections are closed
    2  each stream ends, within a second, with an event that says where to go on
    3  other answers get `stop_s` to be completed; the rest is cut off

What is cut off goes on in the pipeline: its stream can be read, and a POST with its key joins it.
"""

import asyncio
import contextlib
import logging
import resource
import signal
import socket
from collections.abc import Callable, Iterator

import uvicorn
from fastapi import FastAPI

from penstock.config.settings import GatewayProcessSettings
from penstock.errors import PenstockError
from penstock.garbage import freeze_loaded_objects
from penstock.ingest.http.protocol import make_guarded_protocol
from penstock.own_servers import format_place, wait_until_free

log = logging.getLogger(__name__)

LISTEN_BACKLOG = 2048
SEND_BUFFER_BYTES = 128 * 1024
"""Bytes that the kernel buffers for a client that does not read; its default is megabytes."""
MAX_OPEN_FILES = 65536
NUM_OWN_FILES = 256
"""How many open files are left for Redis, Kafka, receivers and batches, and for connections that are being refused."""


def serve_app(app: FastAPI, settings: GatewayProcessSettings, begin_stop: Callable[[], None]) -> None:
    """Serve until a signal stops it, which calls `begin_stop` on the event loop. Raises `PenstockError` if the port is
    taken.
    """
    allowed = limit_connections(settings.guard.max_connections, raise_file_limit())
    settings = settings._replace(guard=settings.guard.model_copy(update={"max_connections": allowed}))
    with open_listener(settings.gateway.host, settings.gateway.port) as listener:
        host, port = listener.getsockname()[:2]
        freeze_loaded_objects()
        log.info("the gateway listens on http://%s", format_place(host, port))
        _Server(app, settings, begin_stop).run(sockets=[listener])


def open_listener(host: str, port: int) -> socket.socket:
    """Return a listening socket. Raises `PenstockError`."""
    wait_until_free(host, port)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=LISTEN_BACKLOG)
    except OSError as error:
        place = format_place(host, port)
        raise PenstockError(f"the gateway cannot listen on {place}: {error}; PENSTOCK_GATEWAY_PORT") from None
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)  # connections inherit it
    return listener


def raise_file_limit() -> int:
    """Raise the limit of open files to `MAX_OPEN_FILES` if the system allows it, and return it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        return wanted
    return MAX_OPEN_FILES if soft == resource.RLIM_INFINITY else soft


def limit_connections(wanted: int, max_open_files: int) -> int:
    """Return how many connections are allowed: of those wanted as many as the process can open."""
    allowed = min(wanted, max_open_files - min(NUM_OWN_FILES, max_open_files // 2))
    if allowed < wanted:
        log.warning(
            f"{max_open_files} open files are allowed, so {allowed} connections instead of {wanted}: "
            "raise the hard limit (ulimit -Hn, LimitNOFILE=) above PENSTOCK_GATEWAY_MAX_CONNECTIONS"
        )
    return allowed


class _Server(uvicorn.Server):
    """uvicorn, with exit status 0 after a signal."""

    def __init__(self, app: FastAPI, settings: GatewayProcessSettings, begin_stop: Callable[[], None]) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                loop="uvloop",
                http=make_guarded_protocol(settings.guard),
                ws="none",
                lifespan="on",
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_graceful_shutdown=settings.gateway.stop_s,  # type: ignore[arg-type]  # it takes fractions
            )
        )
        self._begin_stop = begin_stop

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Stop gracefully at a signal; a second one ends the waiting."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._handle_signal)
        yield

    def _handle_signal(self) -> None:
        self.force_exit = self.should_exit
        self.should_exit = True
        self._begin_stop()
