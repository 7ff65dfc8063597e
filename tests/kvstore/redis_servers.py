"""Redis servers for tests: with options of their own, and behind something that fails as networks do."""

import contextlib
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from penstock.local.processes import start_child, wait_until_serving
from penstock.local.valkey import find_binary
from sim.waiting import PATIENCE_S


@contextlib.contextmanager
def unix_server(directory: Path, *options: str) -> Iterator[str]:
    """A server that listens on a unix socket alone; its url."""
    path = directory / "valkey.sock"
    command = [str(find_binary()), "--port", "0", "--unixsocket", str(path), "--save", "", "--dir", str(directory)]
    child = start_child([*command, *options], name="Valkey", log=directory / "valkey.log", directory=directory)
    try:
        wait_until_serving(child, lambda: _answers(path), PATIENCE_S)
        yield f"unix://{path}"
    finally:
        child.stop()


def _answers(path: Path) -> bool:
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as probe:
        probe.connect(str(path))
        probe.sendall(b"PING\r\n")
        return probe.recv(64) != b""
    return False


class Proxy:
    """Stands between a tier and a server. Cuts connections after so many bytes of replies, or holds them back."""

    def __init__(self, port: int, tls: ssl.SSLContext | None = None) -> None:
        self._server = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._tls = tls
        self._open: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self.left: int | None = None
        """Bytes of replies that still pass; None: all. Then the connection is cut."""
        self.passing = threading.Event()
        """Clear: replies are held back."""
        self.passing.set()
        self.connections = 0

    def __enter__(self) -> "Proxy":
        self._start(self._accept)
        return self

    def __exit__(self, *_: object) -> None:
        self.passing.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._threads[0].join()
        for end in self._open:
            _shut(end)
        for thread in self._threads:
            thread.join()
        for end in (self._listener, *self._open):
            end.close()

    def _start(self, work: Callable[..., None], *args: object) -> None:
        self._threads.append(threading.Thread(target=work, args=args, daemon=True))
        self._threads[-1].start()

    def _accept(self) -> None:
        while True:
            try:
                client = self._listener.accept()[0]
            except OSError:
                return
            try:
                if self._tls is not None:
                    client = self._tls.wrap_socket(client, server_side=True)
                server = socket.create_connection(("127.0.0.1", self._server))
            except OSError:
                client.close()
                continue
            self.connections += 1
            self._open += [client, server]
            self._start(self._forward, client, server, False)
            self._start(self._forward, server, client, True)

    def _forward(self, source: socket.socket, target: socket.socket, replies: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if replies:
                    self.passing.wait()
                    if self.left is not None:
                        data = data[: self.left]
                        self.left -= len(data)
                target.sendall(data)
                if replies and self.left == 0:
                    break
        _shut(source)
        _shut(target)


def _shut(end: socket.socket) -> None:
    with contextlib.suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)
