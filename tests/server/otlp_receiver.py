"""An OTLP/HTTP collector in this process: keeps the spans that it is sent."""

from __future__ import annotations

import contextlib
import gzip
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)


@dataclass
class Receiver:
    url: str
    # what came to which path
    paths: list[str] = field(default_factory=list)
    spans: list[Any] = field(default_factory=list)
    resource: dict[str, Any] = field(default_factory=dict)

    def named(self, name: str) -> Any:
        """The one span of this name."""
        (span,) = [span for span in self.spans if span.name == name]
        return span


def attributes(holder: Any) -> dict[str, Any]:
    """Of a span or a resource, as Python's values."""
    return {pair.key: _value(pair.value) for pair in holder.attributes}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(each) for each in value.array_value.values]
    return getattr(value, kind)


@contextlib.contextmanager
def receiving() -> Iterator[Receiver]:
    receiver = Receiver("")

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            receiver.paths.append(self.path)
            for group in ExportTraceServiceRequest.FromString(body).resource_spans:
                receiver.resource |= attributes(group.resource)
                for scope in group.scope_spans:
                    receiver.spans += scope.spans
            answer = ExportTraceServiceResponse().SerializeToString()
            self.send_response(200)
            self.send_header("Content-Type", "application/x-protobuf")
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, format: str, *args: Any) -> None:
            """Quiet."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        receiver.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        try:
            yield receiver
        finally:
            server.shutdown()
            thread.join(5)
