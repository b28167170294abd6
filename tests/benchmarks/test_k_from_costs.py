"""The measurement of the chosen k: chances that give the lengths asked for, and a verdict that names what is missed."""

import json
import sys
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
import k_from_costs
from k_from_costs import LENGTHS
from kimi_backend.checkpoint.presets import Preset
from kimi_backend.config.settings import ServingSettings
from slice_suite.k_turns import Turn, emitted, scaled_chances, slow_rounds, tokens_per_s, verdict
from slice_suite.recording import Round
from support.made_up_costs import linear_costs


@pytest.mark.parametrize("length", LENGTHS)
def test_chances_are_scaled_to_the_length_of_three_draft_tokens(length: float) -> None:
    chances = scaled_chances(length)
    assert emitted(chances, 3) == pytest.approx(length, abs=1e-6)
    assert max(chances) <= 1
    lengths = [emitted(chances, k) for k in range(8)]
    assert lengths == sorted(lengths)


def test_the_verdict_names_what_is_missed() -> None:
    good = {"length": 3.0, "batch": 4, "of_best": 0.99, "of_plain": 1.2, "mean_k": 2.0}
    rounds = [{"batch": 1, "k": 0, "off": 0.01, "spread": 0.0}, {"batch": 4, "k": 3, "off": -0.04, "spread": 0.02}]
    rounds += [{"batch": 4, "k": 2, "off": 0.04, "spread": 0.035}]
    said = verdict(
        {"drafts": {"bf16": {"rounds": rounds, "adaptive": [good, good | {"of_best": 0.9, "of_plain": 0.95}]}}}
    )
    assert "1 of 3 predictions" in said and "off: B=4 k=3 -4.0%" in said
    assert "1 of 2 adaptive runs" in said and "slow: 3.0 B=4 0.9" in said
    assert "below k = 0: 3.0 B=4 0.95" in said


def a_round(end_s: float, num_accepted: int, *num_draft_tokens: int) -> Round:
    num_rows = len(num_draft_tokens) + sum(num_draft_tokens)
    return Round(
        target_start_s=end_s - 1,
        target_launched_s=end_s - 0.9,
        target_end_s=end_s,
        num_seqs=len(num_draft_tokens),
        num_rows=num_rows,
        is_decode=True,
        num_tokens=len(num_draft_tokens) + num_accepted,
        num_draft_tokens=num_draft_tokens,
    )


def test_luck_moves_no_rate() -> None:
    """Two rounds of 2 s behind the first: one sequence has two draft tokens, of which 0.8 + 0.4 are kept."""
    for num_accepted in (0, 2):
        rounds = [a_round(0.0, 2, 2, 2), a_round(2.0, num_accepted, 2, 0), a_round(4.0, 0, 0, 0)]
        assert tokens_per_s(rounds, (0.8, 0.5)) == pytest.approx((2 + 1.2 + 2) / 4)


class MadeUpPairs:
    """A pair whose rounds take as long as told; more draft tokens, longer rounds."""

    def __init__(self) -> None:
        self.asked: list[tuple[int | None, int]] = []
        self.settings = ServingSettings(max_num_seqs=7)
        self.target = SimpleNamespace(measure_costs=lambda: linear_costs(1000.0, 10.0))
        self.draft = SimpleNamespace(measure_costs=lambda: linear_costs(100.0, 1.0, 1.0))

    def load(self, name: str) -> None:
        self.asked.append((None, -1))

    def turn(self, batch: int, k: int | None, chances: tuple[float, ...], seed: int) -> Turn:
        self.asked.append((k, seed))
        drafted = 1 if k is None else k
        ends = [(number + number * number / 1000) * (1 + drafted) / 1000 for number in range(31)]
        return Turn([a_round(end, 0, *[drafted] * batch) for end in ends], card={"k": k})


def options(**changed: Any) -> Namespace:
    given: dict[str, Any] = {"ks": [0, 2], "lengths": [1.9], "turns": 2, "prompt": 16, "batches": [2], "seconds": 1.2}
    return Namespace(**given | {"preset": Preset.TINY, "layers": 3, "set": ["device=cpu"]} | changed)


def test_every_way_has_its_turns_and_each_second_one_goes_back(capsys: pytest.CaptureFixture[str]) -> None:
    pairs: Any = MadeUpPairs()
    *_, result = k_from_costs.measure_draft("bf16", pairs, options())
    assert pairs.asked == [(None, -1), (2, 0), (0, 0), (None, 0), (None, 1), (0, 1), (2, 1)]
    deep, plain = result["rounds"]
    assert [(found["k"], found["batch"], found["spread"]) for found in (deep, plain)] == [(2, 2, 0.0), (0, 2, 0.0)]
    assert (plain["round_ms"], deep["round_ms"]) == (1.04, 3.12)
    assert plain["turns_ms"] == [1.04, 1.04]
    assert plain["predicted_ms"] == pytest.approx(1.02, abs=0.02)
    assert deep["off"] == round(deep["predicted_ms"] / 3.12 - 1, 4)
    assert deep["card"] == [{"k": 2}] * 2
    (own,) = result["adaptive"]
    rates = own["fixed"]
    assert own["best_k"] == max(rates, key=lambda k: rates[k])
    assert own["of_best"] == pytest.approx(own["adaptive"] / rates[own["best_k"]], abs=2e-3)
    assert own["of_plain"] == pytest.approx(own["adaptive"] / rates[0], abs=2e-3)
    assert (own["mean_k"], own["of_best_by_turn"]) == (1.0, [own["of_best"]] * 2)
    assert own["trace"][0] == [[20, 2.04, {1: 40}], [10, 2.1, {1: 20}]]
    assert result["settings"]["max_num_seqs"] == 7
    assert '"trace"' not in capsys.readouterr().out


def test_the_share_of_time_in_slow_rounds() -> None:
    ends = [0.0, 1.0, 2.0, 3.0, 6.5]
    assert slow_rounds([a_round(end, 0, 0) for end in ends]) == round(2 / 6.5, 4)


def test_room_for_the_largest_case(tmp_path: Path) -> None:
    settings = k_from_costs.slice_settings("cheap", options(batches=[1, 4], seconds=0.012), tmp_path)
    longest = 16 + 80
    assert (settings.max_model_len, settings.kv_tokens, settings.max_num_seqs) == (longest, 4 * (longest + 128), 4)
    assert (settings.max_num_batched_tokens, settings.device, settings.load_format) == (2048, "cpu", "dummy")
    assert settings.draft_vocab == ServingSettings().draft_vocab
    assert k_from_costs.num_output_tokens(options(seconds=1e3)) == 12_000


def test_what_is_measured_is_kept_after_every_batch(tmp_path: Path) -> None:
    given = Namespace(out=tmp_path / "new", draft=["bf16", "cheap"])
    k_from_costs.save(given, {"a": 1})
    assert json.loads((tmp_path / "new/k_from_costs_bf16_cheap.json").read_text()) == {"a": 1}
