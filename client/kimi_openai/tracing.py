"""OpenTelemetry spans of requests: the whole, its queue, its prompt, its rounds, from the server's own statistics.

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
SAMPLED_ROUNDS = 16
"""The most rounds of a request that get spans of their own, evenly spread over its reply."""
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
        """Metadata that hands the trace on to Triton Server.

        A trace that is not sampled stays here: 24.10 does not look at the flag and would record it.
        """
        if not self.span.is_recording():
            return ()
        carrier: dict[str, str] = {}
        _propagator.inject(carrier, set_span_in_context(self.span))
        return tuple(carrier.items())

    @property
    def fields(self) -> dict[str, int]:
        """Fields of the request to Triton Server: a trace that is not sampled asks for no times of rounds."""
        return {"return_round_times": SAMPLED_ROUNDS} if self.span.is_recording() else {}


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
        if not statistics or not request.span.is_recording():
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
        first_s, end_s = statistics["first_token_time_s"], statistics["total_time_s"]
        self._add(request, request.span, "queue", 0.0, statistics["queue_time_s"])
        if first_s is None:
            return
        self._add(request, request.span, "prefill", statistics["queue_time_s"], first_s)
        counts = {name: value for name, value in speculation.items() if isinstance(value, (int, float))}
        rounds = self._add(request, request.span, "rounds", first_s, end_s, counts)
        for entry in statistics.get("round_times", ()):
            names = ("round", "num_draft_tokens", "num_accepted_draft_tokens")
            self._add(request, rounds, "round", entry["start_s"], entry["end_s"], {name: entry[name] for name in names})

    def _add(
        self,
        request: RequestSpan,
        parent: Span,
        name: str,
        start_s: float,
        end_s: float,
        counts: Mapping[str, float] | None = None,
    ) -> Span:
        """A span below `parent`, from and to so many seconds after the request's start."""
        span = self._tracer.start_span(
            name,
            context=set_span_in_context(parent),
            start_time=request.start_ns + int(start_s * _NS),
            attributes={f"kimi.{key}": value for key, value in (counts or {}).items()},
        )
        span.end(request.start_ns + int(max(start_s, end_s) * _NS))
        return span

    def close(self) -> None:
        """Send what is left."""
        self._provider.shutdown()
