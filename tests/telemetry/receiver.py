"""A real OTLP receiver: takes what is posted to it, and decodes it."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.metrics.v1.metrics_pb2 import Metric
from opentelemetry.proto.trace.v1.trace_pb2 import Span


class Receiver(ThreadingHTTPServer):
    """On a free port of 127.0.0.1."""

    daemon_threads = True
    request_queue_size = 256

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.posted: list[tuple[str, bytes]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def metrics(self, service: str = "") -> dict[str, Metric]:
        """The last state of each metric that came, of one service or all."""
        found: dict[str, Metric] = {}
        for body in self._bodies("/v1/metrics"):
            for one in ExportMetricsServiceRequest.FromString(body).resource_metrics:
                attributes = {pair.key: pair.value.string_value for pair in one.resource.attributes}
                if service in ("", attributes["service.name"]):
                    found |= {metric.name: metric for scope in one.scope_metrics for metric in scope.metrics}
        return found

    def spans(self) -> list[Span]:
        return [span for _, span in self.spans_of_services()]

    def spans_of_services(self) -> list[tuple[str, Span]]:
        """All spans, each with the name of the service that it is of."""
        return [
            (next(pair.value.string_value for pair in one.resource.attributes if pair.key == "service.name"), span)
            for body in self._bodies("/v1/traces")
            for one in ExportTraceServiceRequest.FromString(body).resource_spans
            for scope in one.scope_spans
            for span in scope.spans
        ]

    def _bodies(self, path: str) -> list[bytes]:
        return [body for to, body in list(self.posted) if to == path]


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        assert isinstance(self.server, Receiver)
        body = self.rfile.read(int(self.headers["content-length"]))
        assert self.headers["content-type"] == "application/x-protobuf"
        self.server.posted.append((self.path, body))
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def receiving() -> Iterator[Receiver]:
    """One that is up."""
    with Receiver() as receiver:
        thread = threading.Thread(target=receiver.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield receiver
        finally:
            receiver.shutdown()
            thread.join()
