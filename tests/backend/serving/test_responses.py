"""Responses are whole on every path that a request can take."""

import dataclasses
import json
import threading
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kimi_backend.serving.request_parser import ParsedRequest
from kimi_backend.serving.response_sender import MOST_POLLED_AT_ONCE, POLLS_A_ROUND, ResponseSender
from kimi_backend.serving.responses import (
    LEAST_LOGPROB,
    MOST_KEPT,
    ResponseBuilder,
    logprobs_json,
    merge_deltas,
    prompt_logprobs_json,
    statistics_json,
)
from kimi_backend.types.request import (
    EndCause,
    FinishReason,
    GenerateRequest,
    RequestStats,
    TokenDelta,
    TokenLogprobs,
    TokenOrigin,
)
from kimi_backend.types.scoring import TokenScores
from support import fake_pb_utils as pb
from support.waiting import PATIENCE_S, wait_for


def parsed(stream=True):
    return ParsedRequest(
        generate=GenerateRequest(request_id="r", prompt_token_ids=(1, 2, 3)), stream=stream, return_token_ids=True
    )


def delta(i, finish=None, error=None, request_id="r", cause=None):
    return TokenDelta(
        request_id=request_id, token_ids=(i,), text=f"<{i}>", finish_reason=finish, error=error, cause=cause
    )


@pytest.fixture
def sender():
    cancelled = []
    made = ResponseSender(pb, cancelled.append)
    made.cancelled = cancelled
    yield made
    made.close(5)


def test_at_low_load_every_step_is_a_response(sender):
    out = pb.RecordingSender()
    sender.register("r", out, parsed())
    for i in range(5):
        sender.put(delta(i, FinishReason.LENGTH if i == 4 else None))
        wait_for(lambda i=i: len(out.sent) == i + 1)
    assert out.outputs("text_output") == [b"<0>", b"<1>", b"<2>", b"<3>", b"<4>"]
    assert [flags for _, flags in out.sent] == [0, 0, 0, 0, 1]
    assert [int(n) for n in out.outputs("num_input_tokens")] == [3, 0, 0, 0, 0]


def test_what_comes_during_a_send_goes_out_merged(sender):
    gate = threading.Event()
    out = pb.RecordingSender(gate)
    sender.register("r", out, parsed())
    sender.put(delta(0))
    wait_for(lambda: out.num_begun == 1)
    for i in range(1, 6):
        sender.put(delta(i, FinishReason.STOP if i == 5 else None))
    gate.set()
    wait_for(lambda: out.finals == 1)
    assert out.outputs("text_output") == [b"<0>", b"<1><2><3><4><5>"]
    assert [int(n) for n in out.outputs("num_output_tokens")] == [1, 5]


def test_without_streaming_there_is_one_response(sender):
    out = pb.RecordingSender()
    sender.register("r", out, parsed(stream=False))
    for i in range(4):
        sender.put(delta(i, FinishReason.LENGTH if i == 3 else None))
    wait_for(lambda: out.finals == 1)
    assert out.outputs("text_output") == [b"<0><1><2><3>"]


def test_a_failure_ends_with_an_error_and_keeps_what_was_said(sender):
    out = pb.RecordingSender()
    sender.register("r", out, parsed())
    sender.put(delta(0, FinishReason.ERROR, error="the row is not finite"))
    wait_for(lambda: out.finals == 1)
    assert out.outputs("text_output") == [b"<0>"]
    last = out.sent[-1][0]
    assert (last.error().code(), last.error().message()) == ("INTERNAL", "INTERNAL: the row is not finite")


@pytest.mark.parametrize("cause", [EndCause.CLIENT, EndCause.DEADLINE, EndCause.SHUTDOWN])
def test_a_cancellation_is_an_error_only_in_a_shutdown(sender, cause):
    out = pb.RecordingSender()
    sender.register("r", out, parsed())
    sender.put(delta(0, FinishReason.CANCELLED, error="why", cause=cause))
    wait_for(lambda: out.finals == 1)
    last = out.sent[-1][0]
    assert last.has_error() == (cause is EndCause.SHUTDOWN)
    if last.has_error():
        assert last.error().code() == "CANCELLED"
    else:
        assert out.outputs("stop_reason") == [b"why"]


def test_a_client_that_leaves_is_told_to_the_engine_once(sender):
    out = pb.RecordingSender()
    sender.register("r", out, parsed())
    out.cancelled = True
    wait_for(lambda: sender.cancelled == ["r"])
    time.sleep(0.1)
    assert sender.cancelled == ["r"]


def test_a_send_that_fails_disturbs_no_other_request(sender):
    bad, good = pb.RecordingSender(fails=True), pb.RecordingSender()
    sender.register("bad", bad, parsed())
    sender.register("good", good, parsed())
    sender.put(delta(0, FinishReason.LENGTH, request_id="bad"))
    sender.put(delta(0, FinishReason.LENGTH, request_id="good"))
    wait_for(lambda: good.finals == 1)
    assert sender.num_live == 0


def test_a_refused_request_gets_its_one_end(sender):
    out = pb.RecordingSender()
    sender.register("r", out, parsed())
    sender.refuse("r", out, ValueError("secret path"))
    sender.put(delta(0, FinishReason.LENGTH))
    time.sleep(0.05)
    assert out.finals == len(out.sent) == 1
    assert "secret" not in out.sent[0][0].error().message()


def test_origins_of_merged_deltas_are_sent_in_order():
    pieces = [((5,), (0,), (0,)), ((6, 7), (1, 0), (1, 2))]
    deltas = [
        TokenDelta(request_id="r", token_ids=ids, token_origins=origins, token_offsets=offsets)
        for ids, origins, offsets in pieces
    ]
    builder = ResponseBuilder(pb, str)
    sent = builder.build(merge_deltas(deltas), num_input_tokens=0, return_token_ids=False, with_logprobs=False)
    tensors = {tensor.name(): tensor.as_numpy().tolist() for tensor in sent.output_tensors()}
    assert (tensors["token_origins"], tensors["token_offsets"]) == ([[0, 1, 0]], [[0, 1, 2]])
    plain = builder.build(delta(1), num_input_tokens=0, return_token_ids=False, with_logprobs=False)
    assert not {"token_origins", "token_offsets"} & {tensor.name() for tensor in plain.output_tensors()}


def test_control_offsets_and_thinking_are_sent_where_they_were_asked_for(sender):
    for request_id, asked in (("a", {}), ("b", {"return_control_offsets": True, "begins_thinking": True})):
        out = pb.RecordingSender()
        sender.register(request_id, out, dataclasses.replace(parsed(), **asked))
        for i in range(3):
            finish = FinishReason.STOP if i == 2 else None
            made = delta(i, finish, request_id=request_id)
            sender.put(dataclasses.replace(made, control_offsets=(i, i + 9) if i else ()))
            wait_for(lambda i=i, out=out: len(out.sent) == i + 1)
        named = [{tensor.name(): tensor.as_numpy() for tensor in sent.output_tensors()} for sent, _ in out.sent]
        found = [tensors["control_offsets"].tolist() for tensors in named if "control_offsets" in tensors]
        assert found == ([[[1, 10]], [[2, 11]]] if asked else [])
        assert [bool(tensors["begins_thinking"]) for tensors in named if "begins_thinking" in tensors] == [True] * bool(
            asked
        )


def test_a_stop_token_is_told_from_a_stop_text_that_looks_like_it():
    stats = RequestStats(
        num_prompt_tokens=1,
        num_cached_tokens=0,
        num_output_tokens=1,
        max_tokens=8,
        queue_time_s=0.0,
        first_token_time_s=None,
        total_time_s=1.0,
        num_preemptions=0,
        seed=1,
        speculation=None,
    )
    assert statistics_json(stats, 7)["stop_token_id"] == 7
    assert statistics_json(stats, "7")["stop_token_id"] is None


@given(st.lists(st.tuples(st.lists(st.integers(0, 9), max_size=3), st.text(max_size=3)), min_size=1, max_size=6))
def test_merging_loses_nothing(pieces):
    deltas = [TokenDelta(request_id="r", token_ids=tuple(ids), text=text) for ids, text in pieces]
    merged = merge_deltas(deltas)
    assert merged.text == "".join(text for _, text in pieces)
    assert list(merged.token_ids) == [i for ids, _ in pieces for i in ids]


def test_merged_lists_are_in_order_and_the_rest_is_the_lasts_but_for_the_prompts_scores():
    none = np.zeros((1, 0))
    scores = TokenScores(logprobs=np.zeros(1), ranks=np.ones(1, np.int64), top_ids=none, top_logprobs=none)
    first, last = (
        TokenDelta(
            request_id="r",
            token_ids=(i, i + 1),
            text=f"<{i}>",
            logprobs=(TokenLogprobs(token_id=i, logprob=-1.0),),
            token_origins=(TokenOrigin(i), TokenOrigin.TARGET),
            token_offsets=(i, i + 3),
            control_offsets=(i + 5,),
        )
        for i in (1, 2)
    )
    last = dataclasses.replace(last, finish_reason=FinishReason.STOP, matched_stop=7, cause=EndCause.CLIENT, error="e")
    merged = merge_deltas([dataclasses.replace(first, prompt_scores=scores), last])
    for name in ("token_ids", "text", "logprobs", "token_origins", "token_offsets", "control_offsets"):
        assert getattr(merged, name) == getattr(first, name) + getattr(last, name)
    assert merged.prompt_scores is scores
    for name in ("finish_reason", "matched_stop", "cause", "error"):
        assert getattr(merged, name) == getattr(last, name)


def test_what_responses_have_in_common_is_made_once_and_what_differs_is_not():
    builder = ResponseBuilder(pb, str)
    deltas = [delta(1), delta(2), delta(3, FinishReason.STOP), TokenDelta(request_id="r", token_ids=(1, 2), text="")]
    made = [
        {
            tensor.name(): tensor
            for tensor in builder.build(
                one, num_input_tokens=0, return_token_ids=False, with_logprobs=False
            ).output_tensors()
        }
        for one in deltas
    ]
    values = [{name: tensor.as_numpy().reshape(-1)[0] for name, tensor in tensors.items()} for tensors in made]
    assert [v["text_output"] for v in values] == [b"<1>", b"<2>", b"<3>", b""]
    assert [v["finish_reason"] for v in values] == [b"", b"", b"stop", b""]
    assert [v["num_output_tokens"] for v in values] == [1, 1, 1, 2]
    assert all(v["stop_reason"] == v["statistics"] == b"" and v["num_input_tokens"] == 0 for v in values)
    for name in ("finish_reason", "stop_reason", "num_input_tokens", "num_output_tokens", "statistics"):
        assert made[0][name] is made[1][name], name
    assert made[0]["text_output"] is not made[1]["text_output"]


def test_the_prompts_ids_come_once():
    out = pb.RecordingSender()
    sender = ResponseSender(pb, lambda request_id: None)
    sender.register("r", out, parsed())
    sender.put(delta(0))
    wait_for(lambda: len(out.sent) == 1)
    sender.put(delta(1, FinishReason.LENGTH))
    wait_for(lambda: out.finals == 1)
    sender.close(5)
    ids = [
        {t.name(): t.as_numpy().tolist() for t in response.output_tensors() if t.name().endswith("_ids")}
        for response, _ in out.sent
    ]
    assert ids == [{"output_ids": [[0]], "prompt_token_ids": [[1, 2, 3]]}, {"output_ids": [[1]]}]


def test_logprobs_name_their_tokens():
    entry = TokenLogprobs(token_id=7, logprob=-0.5, top=((7, -0.5), (8, -2.0)))
    assert logprobs_json([entry], lambda token_id: f"<{token_id}>") == [
        {
            "token": "<7>",
            "token_id": 7,
            "logprob": -0.5,
            "top": [
                {"token": "<7>", "token_id": 7, "logprob": -0.5},
                {"token": "<8>", "token_id": 8, "logprob": -2.0},
            ],
        }
    ]


def test_large_counts_are_not_kept():
    builder = ResponseBuilder(pb, str)
    for count in range(10_000):
        builder.build(delta(1), num_input_tokens=count, return_token_ids=False, with_logprobs=False)
    assert len(builder._kept) < 2 * MOST_KEPT


@pytest.mark.parametrize("num_live", [1, 4, 5, 16, 67])
def test_everyone_is_asked_within_a_few_polls(num_live, monkeypatch):
    monkeypatch.setattr(ResponseSender, "_run", lambda self: None)
    sender = ResponseSender(pb, lambda request_id: None)
    for i in range(num_live):
        sender.register(str(i), pb.RecordingSender(), parsed())
    polls = [[request_id for request_id, _ in sender._next_to_ask()] for _ in range(2 * POLLS_A_ROUND)]
    assert max(map(len, polls)) <= max(MOST_POLLED_AT_ONCE, -(-num_live // POLLS_A_ROUND))
    for start in range(POLLS_A_ROUND):
        assert len({i for poll in polls[start : start + POLLS_A_ROUND] for i in poll}) == num_live


SCORES = TokenScores(
    logprobs=np.array([-0.5, -np.inf], np.float32),
    ranks=np.array([1, 90]),
    top_ids=np.array([[2], [7]]),
    top_logprobs=np.array([[-0.5], [-0.25]], np.float32),
)


def test_a_prompts_scores_are_json_whatever_the_tokens_texts_are():
    texts = {1: "\u2028", 2: 'a"\\', 3: "\ufffd", 7: "\n"}
    found = json.loads(prompt_logprobs_json((1, 2, 3), SCORES, lambda token_id: json.dumps(texts[token_id])))
    assert [entry["token"] for entry in found] == [texts[1], texts[2], texts[3]]
    assert [entry["token_id"] for entry in found] == [1, 2, 3]
    assert [entry["logprob"] for entry in found] == [None, -0.5, LEAST_LOGPROB]
    assert [entry["rank"] for entry in found] == [None, 1, 90]
    tops = [[], [{"token": texts[2], "token_id": 2, "logprob": -0.5}]]
    assert [entry["top"] for entry in found] == [*tops, [{"token": texts[7], "token_id": 7, "logprob": -0.25}]]


@pytest.mark.parametrize("is_streamed", [True, False])
def test_a_response_with_a_prompts_scores_holds_nobody_up_and_comes_first(is_streamed):
    may_write, is_writing = threading.Event(), threading.Event()

    def token_text(token_id):
        is_writing.set()
        assert may_write.wait(PATIENCE_S)
        return str(token_id)

    sender, scored, other = (
        ResponseSender(pb, lambda name: None, token_text),
        pb.RecordingSender(),
        pb.RecordingSender(),
    )
    sender.register("scored", scored, parsed(stream=is_streamed))
    sender.register("other", other, parsed())
    first = dataclasses.replace(delta(0, request_id="scored"), prompt_scores=SCORES)
    sender.put(first if is_streamed else dataclasses.replace(first, finish_reason=FinishReason.LENGTH))
    assert is_writing.wait(PATIENCE_S)
    if is_streamed:
        sender.put(delta(1, FinishReason.LENGTH, request_id="scored"))
    sender.put(delta(5, FinishReason.LENGTH, request_id="other"))
    wait_for(lambda: other.sent)
    assert (scored.sent, sender.num_live) == ([], 1)
    threading.Timer(0.02, may_write.set).start()
    sender.close(PATIENCE_S)
    assert scored.outputs("text_output") == ([b"<0>", b"<1>"] if is_streamed else [b"<0>"])
    assert [flags for _, flags in scored.sent] == ([0, 1] if is_streamed else [1])
    assert [len(json.loads(text)) for text in scored.outputs("prompt_logprobs")] == [3]
    assert sender.num_live == 0
