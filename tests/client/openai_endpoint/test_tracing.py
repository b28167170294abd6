"""Spans of requests: below the caller's, with the phases that the server reports, and nothing where nobody asks."""

import subprocess
import sys

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from kimi_openai.tracing import RequestTracer
from support.waiting import PATIENCE_S

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
    "round_times": [
        {"round": 0, "start_s": 1.0, "end_s": 1.25, "num_draft_tokens": 3, "num_accepted_draft_tokens": 2},
        {"round": 8, "start_s": 2.5, "end_s": 3.0, "num_draft_tokens": 0, "num_accepted_draft_tokens": 0},
    ],
}


def traced(headers, statistics, error=None):
    """Spans, metadata and fields that Triton Server was handed."""
    exporter = InMemorySpanExporter()
    tracer = RequestTracer(exporter)
    try:
        with tracer.request("POST /v1/completions", headers) as span:
            metadata, fields = dict(span.metadata), span.fields
            span.statistics = statistics
            if error is not None:
                raise error
    finally:
        tracer.close()
    return exporter.get_finished_spans(), metadata, fields


def seconds(span):
    return (span.end_time - span.start_time) / 1e9


def test_a_callers_trace_goes_on_and_has_the_phases_below_it():
    made, metadata, fields = traced({"traceparent": f"00-{TRACE}-{PARENT}-01"}, STATISTICS)
    spans = {span.name: span for span in made if span.name != "round"}
    root = spans.pop("POST /v1/completions")
    assert (f"{root.context.trace_id:032x}", f"{root.parent.span_id:016x}") == (TRACE, PARENT)
    assert metadata["traceparent"] == f"00-{TRACE}-{root.context.span_id:016x}-01"
    assert fields == {"return_round_times": 16}
    lengths = {name: seconds(span) for name, span in spans.items()}
    assert lengths == pytest.approx({"queue": 0.25, "prefill": 0.75, "rounds": 2.0}, abs=1e-6)
    assert all(span.parent.span_id == root.context.span_id for span in spans.values())
    assert spans["rounds"].attributes["kimi.num_spec_steps"] == 10
    assert root.attributes["gen_ai.usage.output_tokens"] == 30
    rounds = [span for span in made if span.name == "round"]
    assert [seconds(span) for span in rounds] == pytest.approx([0.25, 0.5], abs=1e-6)
    assert [span.attributes["kimi.num_accepted_draft_tokens"] for span in rounds] == [2, 0]
    assert {span.parent.span_id for span in rounds} == {spans["rounds"].context.span_id}


def test_a_trace_that_its_caller_did_not_sample_costs_nothing_and_ends_here():
    assert traced({"traceparent": f"00-{TRACE}-{PARENT}-00"}, STATISTICS) == ((), {}, {})


@pytest.mark.parametrize("headers", [{}, {"traceparent": "nonsense"}])
def test_without_a_usable_parent_a_trace_begins_here(headers):
    spans, _, _ = traced(headers, {})
    assert [span.parent for span in spans] == [None]


def test_a_refused_request_has_no_phases_and_is_an_error():
    with pytest.raises(ZeroDivisionError):
        traced({}, {}, ZeroDivisionError("no"))


def test_without_a_collector_nothing_of_it_is_imported():
    program = "import sys, kimi_openai; print([name for name in sys.modules if name.startswith('opentelemetry')])"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=PATIENCE_S, check=True
    )
    assert done.stdout == "[]\n"


def test_a_request_that_drew_no_token_waited_and_no_more():
    spans, *_ = traced({}, {**STATISTICS, "first_token_time_s": None})
    assert sorted(span.name for span in spans) == ["POST /v1/completions", "queue"]
