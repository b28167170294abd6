"""The engine thread's measurements: spans over scripted times, looking up over made-up texts, both to their end."""

import json
import sys
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
import engine_overhead
import lookup_cost
from engine_overhead import InstantDraft, InstantTarget
from kimi_backend.types.plan import DraftPlan, TargetPlan
from steady_plans import steady_plans


def test_spans_leave_out_the_first_ten_steady_steps_and_those_where_somebody_does_not_decode() -> None:
    target, draft = InstantTarget(2, 0), InstantDraft(2, 0)
    target.num_decoding = [0, 1, *[2] * 20, 1]
    for step in range(len(target.num_decoding)):
        # Step 12 is the first that counts: the spans grow by 1 ms and 2 ms a step from there.
        late = max(step - 12, 0) if step < 16 else 500
        target.asked_s.append(10 * step + 2e-3 * (max(step - 13, 0) if step < 17 else 500))
        target.answered_s.append(10 * step + 3)
        draft.asked_s.append(10 * step + 3 + 1e-3 * late)
        draft.answered_s.append(10 * step + 10)
    found = engine_overhead._spans(target, draft, 2, 4)
    assert found == pytest.approx(
        {
            "sequences": 2,
            "steps": 4,
            "draft_reply_to_target_request_ms_median": 3.0,
            "draft_reply_to_target_request_ms_p90": 7.0,
            "target_reply_to_draft_request_ms_median": 1.5,
            "target_reply_to_draft_request_ms_p90": 3.5,
        }
    )


@pytest.mark.parametrize("penalties", [False, True])
def test_the_engine_decodes_over_models_that_answer_at_once(
    penalties: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["engine_overhead", "--sequences", "1,2", "--steps", "24", "--wait-ms", "0", "--json"]
    monkeypatch.setattr(sys, "argv", argv + ["--penalties"] * penalties)
    engine_overhead.main()
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["sequences"] for line in lines] == [1, 2]
    assert all(2 <= line["steps"] <= 24 for line in lines)
    assert all(0 < line["draft_reply_to_target_request_ms_median"] < 1e3 for line in lines)


def test_models_answer_every_row_of_a_steady_step() -> None:
    target, draft = InstantTarget(2, 0, 5000), InstantDraft(2, 0, 5000)
    plan, draft_plan = steady_plans(2, 3)
    answers = [target.answer(plan) for _ in range(50)]
    assert {answer.output_token_ids.shape for answer in answers} == {(2, 4)}
    accepted = np.concatenate([answer.num_accepted_tokens for answer in answers])
    assert set(accepted.tolist()) == {0, 1, 2, 3}
    assert target.num_decoding == [2] * 50
    proposals = draft.answer(draft_plan)
    assert proposals.draft_token_ids is not None
    assert proposals.draft_token_ids.shape == (2, 3)
    assert (answers[0].step_id, proposals.step_id) == (0, 0)
    tokens = np.concatenate([answer.output_token_ids.ravel() for answer in answers])
    assert 1000 <= tokens.min() < 1100
    assert 4900 < tokens.max() < 5000
    described = target.describe(), draft.describe()
    assert [d.draft_vocab_size for d in described] == [None, 5000]
    assert {(d.num_blocks, d.max_num_seqs, d.vocab_size) for d in described} == {(2 * 80 + 512, 2, 5000)}


def listed(plan: TargetPlan | DraftPlan) -> list[list[int]]:
    rows = plan.rows
    return [rows.query_lens.tolist(), rows.seq_lens.tolist(), rows.block_table.tolist(), [len(rows.token_ids)]]


def test_a_steady_steps_plans() -> None:
    target, draft = steady_plans(2, 3, region=1)
    table = [[0, 1, 2], [3, 4, 5]]
    assert listed(target) == [[4, 4], [132, 132], table, [8]]
    assert listed(draft) == [[2, 2], [130, 130], table, [4]]
    assert set(target.rows.token_ids.tolist()) | set(draft.rows.token_ids.tolist()) == {1}
    assert target.num_sampled_rows.tolist() == [4, 4]
    assert target.wants_aux.tolist() == [True, True]
    assert draft.aux_rows.tolist() == [0, 1, 4, 5]
    assert draft.num_proposals.tolist() == [3, 3]
    assert draft.output_index.tolist() == [131, 131]
    assert (target.step_id, draft.step_id, draft.aux.region) == (0, 0, 1)
    for plan in (target, draft):
        assert plan.sampling.temperature.tolist() == [1.0, 1.0]
        assert plan.sampling.seed.tolist() == [0, 1]
    assert steady_plans(1, 0)[1].aux.region is None


def test_what_looking_up_finds_and_keeps() -> None:
    length = 7_000 + lookup_cost.ROUNDS * (lookup_cost.K + 1) + 100
    args = Namespace(tokens=length, min_match=4)
    fresh = lookup_cost.measure(list(lookup_cost.fresh(2, length)), 3, args)
    copied = lookup_cost.measure(list(lookup_cost.copied(2, length)), lookup_cost.K + 1, args)
    assert (fresh["matches"], copied["matches"]) == (0.0, 1.0)
    for found in (fresh, copied):
        assert 4 < found["bytes_a_token"] < 64
        assert found["mib"] == pytest.approx(found["bytes_a_token"] * 2 * length / (1 << 20), abs=0.06)
        assert 0 <= found["us_a_token"] < 1e4
    assert copied["ms_a_round"] == pytest.approx(copied["us_a_token"] * 2 * 8 / 1e3, abs=0.1)
    (text,) = lookup_cost.copied(1, 7_010)
    assert text[:10].tolist() == text[7_000:].tolist()
    assert lookup_cost.indexing(64, 4)["prompt_tokens"] == 64


def test_source_texts_come_from_places_of_one_long_text() -> None:
    texts = list(lookup_cost.source(3, 40))
    assert [len(text) for text in texts] == [40] * 3
    assert len({text.tobytes() for text in texts}) == 3


def test_the_lookup_report_names_every_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(lookup_cost, "indexing", lambda count, min_match: {"prompt_tokens": count})
    file = tmp_path / "out.json"
    monkeypatch.setattr(sys, "argv", ["lookup_cost", "--sequences", "1", "2", "--tokens", "600", "--json", str(file)])
    lookup_cost.main()
    report = json.loads(file.read_text())
    texts = [(row["text"], row["sequences"]) for row in report["rounds"]]
    assert texts == [(text, count) for count in (1, 2) for text in ("fresh", "copied", "source")]
    printed = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert printed == report["indexing"] + report["rounds"]
