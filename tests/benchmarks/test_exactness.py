"""benchmarks/exactness.py sees what it is there to see: gaps are the draws' own, a fault is no rounding."""

import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from kimi_kernels.kernel_set import KernelSet

ROOT = Path(__file__).resolve().parents[2]
PROMPTS = [tuple(range(300, 330)), tuple(range(500, 517)), (7, 8, 9, 10)]
NUM_TOKENS = 10


@pytest.fixture(scope="module")
def suite() -> Iterator[SimpleNamespace]:
    """The modules, found as the script finds them."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        from exactness_suite import compare, free_running, recording, teacher_forced

        yield SimpleNamespace(
            compare=compare, free_running=free_running, recording=recording, teacher_forced=teacher_forced
        )
    finally:
        sys.path.remove(str(ROOT / "benchmarks"))


@pytest.fixture(scope="module")
def target(suite):
    kernels = KernelSet.plain()
    return suite.teacher_forced.ForcedTarget(ROOT / "demo/kimi-nano", kernels, torch.float32, "cpu", longest=64)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_windows_of_a_row_invariant_set_differ_nowhere(suite, target, temperature):
    plain = target.run(PROMPTS, temperature, NUM_TOKENS, 1, None)
    windowed = target.run(PROMPTS, temperature, NUM_TOKENS, 4, plain)
    for name in ("token_ids", "score_gaps", "router_gaps"):
        assert np.array_equal(getattr(plain, name), getattr(windowed, name)), name
    assert (plain.score_gaps > 0).all()
    assert (plain.router_gaps > 0).all()
    result = suite.compare.compare(plain, windowed)
    assert (result["positions"], result["same_share"], result["differences"]) == (
        len(PROMPTS) * (NUM_TOKENS - 1),
        1,
        [],
    )


def test_another_text_is_a_difference_that_rounding_does_not_explain(suite, target):
    plain = target.run(PROMPTS, 0.0, NUM_TOKENS, 1, None)
    shuffled = dataclasses.replace(plain, token_ids=plain.token_ids[:, ::-1].copy())
    result = suite.compare.compare(plain, target.run(PROMPTS, 0.0, NUM_TOKENS, 4, shuffled))
    assert result["same_share"] < 0.9
    assert len(result["differences"]) == round((1 - result["same_share"]) * result["positions"])


def a_pass(suite, token_ids, score_gaps, router_gaps):
    return suite.teacher_forced.Pass(*(np.array([[0, *row]]) for row in (token_ids, score_gaps, router_gaps)))


def test_a_difference_is_rounding_only_where_a_gap_is_small(suite):
    """Rounding moves scores by 0.01 and routers by 0.001 at the positions that agree."""
    tokens, others = [1] * 100 + [2, 2, 2], [1] * 100 + [3, 3, 3]
    plain = a_pass(suite, tokens, [1.0] * 100 + [0.039, 1.0, 1.0], [0.5] * 100 + [0.5, 0.0039, 0.5])
    windowed = a_pass(suite, others, [1.01] * 100 + [0.1] * 3, [0.501] * 100 + [0.1] * 3)
    result = suite.compare.compare(plain, windowed)
    assert result["same_share"] == pytest.approx(100 / 103)
    assert result["score_noise_p99"] == pytest.approx(0.01)
    assert [d["is_rounding"] for d in result["differences"]] == [True, True, False]
    assert [d["index"] for d in result["differences"]] == [101, 102, 103]
    assert result["unexplained"] == 1


def test_texts_are_compared_to_the_last_token(suite):
    free_running = suite.free_running
    assert free_running.num_identical([(1, 2), (3, 4)], [(1, 2), (3, 5)]) == 1
    assert free_running.first_difference((3, 4), (3, 5)) == 1
    assert free_running.first_difference((3, 4), (3, 4)) is None


@pytest.fixture(scope="module")
def script(suite):
    """The script itself."""
    import exactness

    return exactness


def given(**changed) -> SimpleNamespace:
    values = {"token_ids": PROMPTS, "k": [0, 2, 3], "rotate": True, "num_tokens": 4, "device": "cpu", "batch": 2}
    return SimpleNamespace(**values | {"checkpoint": ROOT / "demo/kimi-nano", "draft": None} | changed)


def test_each_prompt_runs_with_one_k_of_each_temperature_where_they_rotate(script):
    cases = script._cases(given())
    assert [k for _, k in cases] == sorted((k for _, k in cases), reverse=True)
    for number, temperature in enumerate(script.TEMPERATURES):
        assert cases[temperature, 0] == [0, 1, 2]
        shares = [cases[temperature, k] for k in (2, 3)]
        assert shares == ([[0, 2], [1]] if number % 2 == 0 else [[1], [0, 2]])
    assert set(map(tuple, script._cases(given(rotate=False)).values())) == {(0, 1, 2)}


def test_texts_are_counted_up_to_their_first_difference(script):
    row = script._free_row([(1, 2, 3, 4), (5, 6, 7, 8)], [(1, 2, 3, 4), (5, 6, 0, 8)])
    assert row == {
        "texts": 2,
        "identical": 1,
        "share": 0.5,
        "share_of_tokens_before_the_first_difference": 0.75,
    }


def test_the_exactness_settings_have_room_for_the_longest_prompt(script):
    settings = script.settings_of(given(), "auto", 2)
    longest = 30 + 4 + script.MAX_SPECULATIVE_TOKENS + 1
    assert (settings.max_model_len, settings.kv_tokens, settings.max_num_seqs) == (longest, 4 * longest, 2)
    assert settings.draft == str(ROOT / "demo/kimi-nano/draft")
    assert script.settings_of(given(draft=ROOT / "demo"), "auto", 2).draft == str(ROOT / "demo")


def test_batches_of_a_pass_are_joined_in_order(script, suite, target, monkeypatch):
    whole = target.run(PROMPTS, 0.0, 4, 1, None)
    monkeypatch.setattr(script, "FORCED_BATCH", 2)
    joined = script._in_batches(target, given(), 0.0, 1, None)
    assert np.array_equal(joined.token_ids, whole.token_ids)
    forced = script._in_batches(target, given(), 0.0, 4, joined)
    assert np.array_equal(forced.token_ids, whole.token_ids)
