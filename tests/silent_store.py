"""An object store that takes questions and answers none, until a test is over."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest


class _Handler(BaseHTTPRequestHandler):
    is_over: threading.Event
    asked: threading.Semaphore

    def answer(self) -> None:
        if self.command == "PUT":
            self.asked.release()
        self.is_over.wait()
        with suppress(OSError):
            self.send_error(403)

    def log_message(self, *_: object) -> None:
        """Nothing."""


@contextmanager
def serve_silence(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[threading.Semaphore, threading.Event]]:
    """Yield a count of the objects that came, and what refuses these and all other questions. The store is `s3://bucket`."""
    asked, is_over = threading.Semaphore(0), threading.Event()
    methods = dict.fromkeys(("do_GET", "do_PUT", "do_HEAD", "do_POST"), _Handler.answer)
    handler = type("Handler", (_Handler,), {"asked": asked, "is_over": is_over, **methods})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        for name, value in (
            ("ENDPOINT", f"http://127.0.0.1:{server.server_port}"),
            ("ALLOW_HTTP", "true"),
            ("ACCESS_KEY_ID", "key"),
            ("SECRET_ACCESS_KEY", "secret"),
            ("REGION", "us-east-1"),
        ):
            monkeypatch.setenv(f"AWS_{name}", value)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield asked, is_over
        finally:
            is_over.set()
            server.shutdown()
            thread.join()
