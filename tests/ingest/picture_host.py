"""A host of pictures on this machine, by https, which answers what its path says."""

import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from tests.security.certificates import Authority

NAME = "one.pictures.test"


class PictureHost(ThreadingHTTPServer):
    """On a port of 127.0.0.1, with a certificate for the names below `pictures.test`."""

    def __init__(self, picture: bytes, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        authority = Authority(folder / "authority")
        certificate, key = authority.sign("pictures")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, key)
        self.socket = context.wrap_socket(self.socket, server_side=True, do_handshake_on_connect=False)
        self.picture, self.is_over = picture, threading.Event()
        self.trust = ssl.create_default_context(cafile=str(authority.file))
        self.asked: list[tuple[str, str]] = []
        """The host and the path of each question."""

    @property
    def url(self) -> str:
        return f"https://{NAME}:{self.server_port}"

    def handle_error(self, *_: object) -> None:
        """Who finds the certificate wrong, or has read enough, is no error here."""


class _Handler(BaseHTTPRequestHandler):
    server: PictureHost

    def do_GET(self) -> None:
        path, query = urlsplit(self.path).path, parse_qs(urlsplit(self.path).query)
        self.server.asked.append((self.headers["host"], path))
        with suppress(OSError):
            if "to" in query or path == "/nowhere":
                self._send(302, location=query.get("to", [""])[0])
            elif path == "/circle":
                self._send(302, location=path)
            elif path == "/gone":
                self._send(404)
            elif path == "/hangs":
                self.server.is_over.wait()
            elif path == "/endless":
                self._send(200)
                while not self.server.is_over.is_set():
                    self.wfile.write(bytes(65_536))
            elif path == "/packed":
                self._send(200, **{"content-encoding": "gzip"})
            else:
                self._send(200, **{"content-length": str(len(self.server.picture))})
                self.wfile.write(self.server.picture)

    def _send(self, status: int, **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Nothing."""


@contextmanager
def serve_picture(picture: bytes, folder: Path) -> Iterator[PictureHost]:
    with PictureHost(picture, folder) as host:
        thread = threading.Thread(target=host.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield host
        finally:
            host.is_over.set()
            host.shutdown()
            thread.join()
