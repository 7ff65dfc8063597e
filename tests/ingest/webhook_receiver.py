"""A receiver of webhooks on this machine, which answers as a test says."""

import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import openai

SECRET = "whsec_" + "c2VjcmV0IG9mIHRoZSB3ZWJob29rcyBvZiB0ZXN0cw=="
HANGS, ENDLESS, REDIRECTS = -1, -2, 302
"""Answers that are no plain status: none at all, and one whose body never ends."""


class WebhookReceiver(ThreadingHTTPServer):
    """On a port of 127.0.0.1."""

    request_queue_size = 256  # with five, what comes at once is reset

    def __init__(self, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.posted: list[tuple[dict[str, str], bytes]] = []
        """The headers, in lower case, and the body of each request."""
        self.paths: list[str] = []
        self.answers: list[int] = []
        """What the next requests are answered; then 200."""
        self.default = 200
        self.is_over = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/hook?token=abc"

    @property
    def ids(self) -> list[str]:
        return [headers["webhook-id"] for headers, _ in list(self.posted)]

    def unwrap(self, secret: str = SECRET) -> list[Any]:
        """Return all events as OpenAI's SDK reads them. Raises where a signature is wrong."""
        with openai.OpenAI(api_key="none", webhook_secret=secret) as sdk:
            return [sdk.webhooks.unwrap(body, headers) for headers, body in list(self.posted)]

    def handle_error(self, *_: object) -> None:
        """A gateway that is killed, or waits no longer, is no error here."""


class _Handler(BaseHTTPRequestHandler):
    server: WebhookReceiver

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.server.paths.append(self.path)
        self.server.posted.append(({name.lower(): value for name, value in self.headers.items()}, body))
        answer = self.server.answers.pop(0) if self.server.answers else self.server.default
        if answer == HANGS:
            self.server.is_over.wait()
            return
        self.send_response(200 if answer == ENDLESS else answer)
        if answer == REDIRECTS:
            self.send_header("location", "/elsewhere")
        self.end_headers()
        while answer == ENDLESS and not self.server.is_over.is_set():
            self.wfile.write(b"x" * 65536)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@contextmanager
def receive_webhooks(port: int = 0, certificate: tuple[Path, Path] | None = None) -> Iterator[WebhookReceiver]:
    """Serve until the context ends; with a certificate by TLS."""
    with WebhookReceiver(port) as made:
        if certificate is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(*certificate)
            made.socket = context.wrap_socket(made.socket, server_side=True)
        thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield made
        finally:
            made.is_over.set()
            with suppress(OSError):
                made.shutdown()
            thread.join()
