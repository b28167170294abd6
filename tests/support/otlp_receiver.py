"""A receiver of OpenTelemetry's spans over HTTP, as protobuf or as JSON, kept span by span; and a real collector."""

import gzip
import importlib.util
import json
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from kimi_backend.hosting.embedded_server import free_port
from support.waiting import wait_for


class ReceivedSpan(NamedTuple):
    service: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    attributes: frozenset[str]
    events: tuple[str, ...]


class Receiver:
    """Its spans so far, in the order of arrival."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.spans: list[ReceivedSpan] = []

    def wait_for(self, is_there: Callable[[list[ReceivedSpan]], bool]) -> list[ReceivedSpan]:
        """The spans, once they are all there."""
        return wait_for(lambda: spans if is_there(spans := list(self.spans)) else [], lambda: self.spans, poll_s=0.05)


def _of_protobuf(body: bytes) -> Iterator[ReceivedSpan]:
    for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
        service = next(a.value.string_value for a in resource.resource.attributes if a.key == "service.name")
        for span in (span for scope in resource.scope_spans for span in scope.spans):
            ids = (span.trace_id.hex(), span.span_id.hex(), span.parent_span_id.hex())
            keys = frozenset(attribute.key for attribute in span.attributes)
            yield ReceivedSpan(service, span.name, *ids, keys, tuple(event.name for event in span.events))


def _of_json(body: bytes) -> Iterator[ReceivedSpan]:
    for resource in json.loads(body)["resourceSpans"]:
        attributes = resource["resource"]["attributes"]
        service = next(a["value"]["stringValue"] for a in attributes if a["key"] == "service.name")
        for span in (span for scope in resource["scopeSpans"] for span in scope["spans"]):
            ids = (span["traceId"], span["spanId"], span.get("parentSpanId", ""))
            keys = frozenset(attribute["key"] for attribute in span.get("attributes", ()))
            yield ReceivedSpan(service, span["name"], *ids, keys, tuple(e["name"] for e in span.get("events", ())))


@contextmanager
def receiving() -> Iterator[Receiver]:
    """A receiver on a free port of 127.0.0.1."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            read = _of_json if self.headers["Content-Type"].startswith("application/json") else _of_protobuf
            receiver.spans += read(body)
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        receiver = Receiver(server.server_port)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield receiver
        finally:
            server.shutdown()
            thread.join()


@contextmanager
def collecting(receiver: Receiver) -> Iterator[str]:
    """The URL of a collector that hands on to `receiver`: Rotel, where the extra `collector` is installed, else it."""
    found = importlib.util.find_spec("rotel")
    if found is None or found.origin is None:
        yield receiver.url
        return
    address = f"127.0.0.1:{free_port()}"
    options = {
        "otlp-http-endpoint": address,
        "otlp-grpc-endpoint": f"127.0.0.1:{free_port()}",
        "exporter": "otlp",
        "otlp-exporter-protocol": "http",
        "otlp-exporter-endpoint": receiver.url,
    }
    agent = Path(found.origin).with_name("rotel-agent")
    process = subprocess.Popen([agent, "start", *(f"--{name}={value}" for name, value in options.items())])
    try:
        yield f"http://{address}"
    finally:
        process.terminate()
        process.wait()
