"""OpenTelemetry spans of requests: the whole, its queue, its prompt and its rounds, from the server's own statistics.

A caller's `traceparent` is continued, and Triton Server gets one, so that its trace of `spec_ensemble` hangs below.
Only where an exporter is named (`kimi openai --otlp-endpoint`) is any of it imported or done.
"""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

TRACES_PATH = "/v1/traces"
_NS = 1e9
_propagator = TraceContextTextMapPropagator()


@dataclass(slots=True)
class RequestSpan:
    """One request's span while it runs."""

    span: Span
    start_ns: int
    statistics: Mapping[str, Any] = field(default_factory=dict)
    """Set it when the server has said them."""

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Metadata that hands the trace on to Triton Server."""
        carrier: dict[str, str] = {}
        _propagator.inject(carrier, set_span_in_context(self.span))
        return tuple(carrier.items())


class RequestTracer:
    """Makes spans and sends them from a thread of its own."""

    def __init__(self, exporter: SpanExporter) -> None:
        self._provider = TracerProvider(resource=Resource.create({SERVICE_NAME: "kimi-openai"}))
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("kimi_openai")

    @classmethod
    def to(cls, endpoint: str) -> "RequestTracer":
        """
        Args:
            endpoint: URL of an OTLP collector over HTTP, such as http://localhost:4318.
        """
        return cls(OTLPSpanExporter(endpoint=endpoint.rstrip("/") + TRACES_PATH))

    @contextmanager
    def request(self, name: str, headers: Mapping[str, str]) -> Iterator[RequestSpan]:
        """A span from here to the end of the reply, below the caller's if it named one."""
        context = _propagator.extract({key: headers[key] for key in ("traceparent", "tracestate") if key in headers})
        start_ns = time.time_ns()
        span = self._tracer.start_span(name, context=context, kind=SpanKind.SERVER, start_time=start_ns)
        made = RequestSpan(span, start_ns)
        try:
            yield made
        except BaseException as error:
            span.set_status(Status(StatusCode.ERROR, type(error).__name__))
            raise
        finally:
            self._add_phases(made)
            span.end()

    def _add_phases(self, request: RequestSpan) -> None:
        """Spans below it. The server counts from a request's arrival there, a little after the endpoint's start."""
        statistics = request.statistics
        if not statistics:
            return
        speculation = statistics.get("speculative_decoding") or {}
        request.span.set_attributes(
            {
                "gen_ai.usage.input_tokens": statistics["num_prompt_tokens"],
                "gen_ai.usage.output_tokens": statistics["num_output_tokens"],
                "kimi.cached_tokens": statistics["num_cached_tokens"],
                "kimi.preemptions": statistics["num_preemptions"],
            }
        )
        ends = {"queue": statistics["queue_time_s"], "prefill": statistics["first_token_time_s"]}
        ends["rounds"] = statistics["total_time_s"] if ends["prefill"] is not None else None
        context, since_s = set_span_in_context(request.span), 0.0
        for name, until_s in ends.items():
            if until_s is None:
                return
            rounds = {f"kimi.{key}": value for key, value in speculation.items() if isinstance(value, (int, float))}
            span = self._tracer.start_span(
                name,
                context=context,
                start_time=request.start_ns + int(since_s * _NS),
                attributes=rounds if name == "rounds" else None,
            )
            span.end(request.start_ns + int(max(since_s, until_s) * _NS))
            since_s = until_s

    def close(self) -> None:
        """Send what is left."""
        self._provider.shutdown()
