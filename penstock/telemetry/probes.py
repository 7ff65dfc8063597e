"""What who runs a worker asks of it by HTTP, beside its figures."""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment


def with_probes(figures: "WSGIApplication", is_ready: Callable[[], bool]) -> "WSGIApplication":
    """`figures`, and before it `/healthz`: the process answers; `/readyz`: 503 while `is_ready()` is false."""
    probes: dict[str, Callable[[], bool]] = {"/healthz": lambda: True, "/readyz": is_ready}

    def app(environ: "WSGIEnvironment", start_response: "StartResponse") -> Iterable[bytes]:
        if (probe := probes.get(environ["PATH_INFO"])) is None:
            return figures(environ, start_response)
        is_well = probe()
        start_response("200 OK" if is_well else "503 Service Unavailable", [("Content-Type", "text/plain")])
        return [b"ok\n" if is_well else b"not ready\n"]

    return app
