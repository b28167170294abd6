"""Spans of requests: below the caller's, with the phases that the server reports, and nothing where nobody asks."""

import subprocess
import sys

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from kimi_openai.tracing import RequestTracer

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
STATISTICS = {
    "num_prompt_tokens": 12,
    "num_output_tokens": 30,
    "num_cached_tokens": 0,
    "num_preemptions": 0,
    "queue_time_s": 0.25,
    "first_token_time_s": 1.0,
    "total_time_s": 3.0,
    "speculative_decoding": {"num_spec_steps": 10, "acceptance_histogram": [1, 2]},
}


def traced(headers, statistics, error=None):
    """Spans by name, and what Triton Server was handed."""
    exporter = InMemorySpanExporter()
    tracer = RequestTracer(exporter)
    try:
        with tracer.request("POST /v1/completions", headers) as span:
            metadata = dict(span.metadata)
            span.statistics = statistics
            if error is not None:
                raise error
    finally:
        tracer.close()
    return {span.name: span for span in exporter.get_finished_spans()}, metadata


def test_a_callers_trace_goes_on_and_has_the_phases_below_it():
    spans, metadata = traced({"traceparent": f"00-{TRACE}-{PARENT}-01"}, STATISTICS)
    root = spans["POST /v1/completions"]
    assert (f"{root.context.trace_id:032x}", f"{root.parent.span_id:016x}") == (TRACE, PARENT)
    assert metadata["traceparent"] == f"00-{TRACE}-{root.context.span_id:016x}-01"
    seconds = {name: (span.end_time - span.start_time) / 1e9 for name, span in spans.items() if span is not root}
    assert seconds == pytest.approx({"queue": 0.25, "prefill": 0.75, "rounds": 2.0}, abs=1e-6)
    assert all(span.parent.span_id == root.context.span_id for span in spans.values() if span is not root)
    assert spans["rounds"].attributes["kimi.num_spec_steps"] == 10
    assert root.attributes["gen_ai.usage.output_tokens"] == 30


@pytest.mark.parametrize("headers", [{}, {"traceparent": "nonsense"}])
def test_without_a_usable_parent_a_trace_begins_here(headers):
    spans, _ = traced(headers, {})
    assert [span.parent for span in spans.values()] == [None]


def test_a_refused_request_has_no_phases_and_is_an_error():
    with pytest.raises(ZeroDivisionError):
        traced({}, {}, ZeroDivisionError("no"))


def test_without_a_collector_nothing_of_it_is_imported():
    program = "import sys, kimi_openai; print([name for name in sys.modules if name.startswith('opentelemetry')])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "[]\n"
