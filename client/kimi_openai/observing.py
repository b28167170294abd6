"""The endpoint tells of itself: Prometheus metrics on a port of their own, and a line of log for each request."""

import logging
import time

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kimi_openai.generation import REQUEST_ID_HEADER
from kimi_openai.routes import ROUTES

ACCESS_LOGGER = "kimi_openai.access"
KEY_NAME = "kimi_key_name"
"""The field of a request's scope that has the name of its key."""
PATHS = frozenset({"/", *(route.path for route in ROUTES)})
OTHER_PATH = "other"
"""Label of every other path: strangers choose those."""
_BUCKETS_S = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300)
_access = logging.getLogger(ACCESS_LOGGER)


class EndpointMetrics:
    """The metrics of one endpoint, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "kimi_openai_requests", "Requests that were answered.", ("path", "status"), registry=self.registry
        )
        self.seconds = Histogram(
            "kimi_openai_request_seconds",
            "Time from a request's head to the end of its reply.",
            ("path",),
            registry=self.registry,
            buckets=_BUCKETS_S,
        )
        self.first_byte_seconds = Histogram(
            "kimi_openai_first_byte_seconds",
            "Time from a request's head to the head of its reply, which a stream has with its first token.",
            ("path",),
            registry=self.registry,
            buckets=_BUCKETS_S,
        )
        self.running = Gauge(
            "kimi_openai_requests_running", "Requests without the end of a reply.", registry=self.registry
        )
        self.key_requests = Counter(
            "kimi_openai_key_requests", "Requests of each key.", ("key", "status"), registry=self.registry
        )


class Observed:
    """Middleware that measures each request and writes a line of it, where the access log is on."""

    def __init__(self, app: ASGIApp, metrics: EndpointMetrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Hand the request on and look at what is sent."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        start, path = time.monotonic(), scope["path"] if scope["path"] in PATHS else OTHER_PATH
        status, request_id = 499, ""  # what a client that left gets

        async def watched(message: Message) -> None:
            nonlocal status, request_id
            if message["type"] == "http.response.start":
                status = message["status"]
                request_id = Headers(raw=message["headers"]).get(REQUEST_ID_HEADER, "")
                self._metrics.first_byte_seconds.labels(path).observe(time.monotonic() - start)
            await send(message)

        with self._metrics.running.track_inprogress():
            try:
                await self._app(scope, receive, watched)
            finally:
                seconds, key = time.monotonic() - start, scope.get(KEY_NAME, "")
                self._metrics.requests.labels(path, str(status)).inc()
                self._metrics.seconds.labels(path).observe(seconds)
                if key:
                    self._metrics.key_requests.labels(key, str(status)).inc()
                _log(scope, status, seconds, request_id, key)


def _log(scope: Scope, status: int, seconds: float, request_id: str, key: str) -> None:
    if not _access.isEnabledFor(logging.INFO):
        return
    fields = {
        "method": scope["method"],
        "path": scope["path"],
        "status": status,
        "seconds": round(seconds, 4),
        "request_id": request_id,
        "key": key,
        "client": (scope.get("client") or ("",))[0],
    }
    _access.info(" ".join(f"{name}={value!r}" for name, value in fields.items() if value != ""), extra=fields)
