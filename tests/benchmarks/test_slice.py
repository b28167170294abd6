"""`benchmarks/slice.py`: its floor against sums by hand, and a run of a tiny slice through the engine on a CPU."""

import json
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

REPOSITORY = Path(__file__).parents[2]
sys.path.insert(0, str(REPOSITORY / "benchmarks"))

from kimi_backend.checkpoint.presets import Preset  # noqa: E402
from kimi_backend.config.draft_config import Eagle3DraftConfig, Eagle3MlaDraftConfig  # noqa: E402
from kimi_backend.config.model_config import KimiModelConfig  # noqa: E402
from kimi_backend.config.settings import ServingSettings  # noqa: E402
from kimi_client.load import RequestTimes  # noqa: E402
from kimi_kernels.kernel_set import KernelSet  # noqa: E402
from slice_suite.configs import write_slice  # noqa: E402
from slice_suite.floor import Load, draft_bytes, target_bytes, touched_experts  # noqa: E402
from slice_suite.gpu_time import coverage, kind_of, last_rounds  # noqa: E402
from slice_suite.judged import judged_table, on_an_h100  # noqa: E402
from slice_suite.prompt_steps import NUM_TURNS, STEPS_A_TURN, PromptStep, measure_prompt_step  # noqa: E402
from slice_suite.report import beside_verdicts, per_layer  # noqa: E402
from slice_suite.served import rounds_ms, server_share  # noqa: E402
from slice_suite.tables import draft_of  # noqa: E402
from support.captured_runners import Setting, runner_pair  # noqa: E402
from support.plain_recorder import PlainRecorder  # noqa: E402

H, EXPERT = 7168, 3 * 7168 * 2048
MLA = 1536 * H + 64 * 192 * 1536 + 576 * H + 64 * 256 * 512 + H * 64 * 128


@pytest.fixture(scope="module")
def configs(tmp_path_factory: pytest.TempPathFactory) -> tuple[KimiModelConfig, Eagle3MlaDraftConfig]:
    target, draft = write_slice(tmp_path_factory.mktemp("slice"), 5, Preset.KIMI_K25)
    config = KimiModelConfig.from_hf_json(target)
    draft_config = Eagle3DraftConfig.from_hf_json(draft, config)
    assert isinstance(draft_config, Eagle3MlaDraftConfig)
    return config, draft_config


def test_the_floor_of_a_verify_counts_each_weight_once(
    configs: tuple[KimiModelConfig, Eagle3MlaDraftConfig],
) -> None:
    parts = target_bytes(configs[0], Load(batch_size=1, context=1000, num_draft_tokens=0))
    assert parts["experts"] == pytest.approx(4 * 8 * EXPERT * 0.5625, rel=1e-3)  # a byte for two codes, scales
    assert parts["shared experts"] == 4 * EXPERT * 2
    assert parts["attention weights"] == pytest.approx(5 * MLA * 2, rel=1e-3)  # and norms
    assert parts["dense layer"] == 3 * H * 18432 * 2
    assert parts["head"] == 163840 * H * 2
    assert parts["router"] == pytest.approx(4 * 384 * H * 2, rel=1e-3)
    assert parts["KV"] == 5 * 1000 * 576 * 2


def test_rows_share_experts_and_sequences_do_not_share_keys(
    configs: tuple[KimiModelConfig, Eagle3MlaDraftConfig],
) -> None:
    config = configs[0]
    assert touched_experts(config, 1) == pytest.approx(8)
    assert 8 * 15 < touched_experts(config, 16) + 15 < 8 * 16
    assert touched_experts(config, 10_000) == pytest.approx(384)
    one = target_bytes(config, Load(batch_size=1, context=1000, num_draft_tokens=3))
    four = target_bytes(config, Load(batch_size=4, context=1000, num_draft_tokens=0))
    assert one["experts"] == four["experts"]
    assert 4 * one["KV"] == four["KV"]


def test_the_floor_of_a_proposal_reads_the_draft_k_times(
    configs: tuple[KimiModelConfig, Eagle3MlaDraftConfig],
) -> None:
    draft = configs[1]
    load = Load(batch_size=1, context=1000, num_draft_tokens=3)
    plain = draft_bytes(draft, ServingSettings(), load)
    assert plain["head"] == 3 * 163840 * H * 2
    assert plain["fc"] == 3 * H * H * 2
    wider = MLA + (1536 + 576) * H  # reads embedding and hidden state
    assert plain["layer"] == 3 * (wider + 3 * H * 18432) * 2
    small = draft_bytes(draft, ServingSettings(draft_vocab=32768, draft_quantization="int4"), load)
    assert small["head"] == 3 * 32768 * H * 0.5625
    assert small["layer"] == pytest.approx(plain["layer"] * 0.28, rel=0.05)
    assert draft_bytes(draft, ServingSettings(), Load(batch_size=1, context=9, num_draft_tokens=0)) == {}


def test_a_rank_reads_its_slices_and_whole_what_every_rank_keeps(
    configs: tuple[KimiModelConfig, Eagle3MlaDraftConfig],
) -> None:
    load = Load(batch_size=4, context=1000, num_draft_tokens=0)
    whole, rank = target_bytes(configs[0], load), target_bytes(configs[0], load, num_ranks=8)
    for part in ("experts", "shared experts", "dense layer", "head"):
        assert rank[part] == pytest.approx(whole[part] / 8)
    assert (rank["router"], rank["KV"]) == (whole["router"], whole["KV"])
    first_products = 1536 * H + 576 * H
    assert rank["attention weights"] == pytest.approx(5 * 2 * (first_products + (MLA - first_products) / 8), rel=1e-3)
    assert target_bytes(configs[0], load, num_ranks=1) == whole


def test_a_rank_of_a_draft_reads_its_slices(configs: tuple[KimiModelConfig, Eagle3MlaDraftConfig]) -> None:
    load = Load(batch_size=1, context=1000, num_draft_tokens=3)
    rank = draft_bytes(configs[1], ServingSettings(), load, num_ranks=8)
    assert rank["head"] == 3 * 163840 * H * 2 / 8
    assert rank["fc"] == 3 * H * H * 2 / 8
    first_products = 2 * (1536 + 576) * H  # reads embedding and hidden state
    divided = MLA - (1536 + 576) * H + 3 * H * 18432
    assert rank["layer"] == 3 * (first_products + divided / 8) * 2


def test_two_depths_give_a_layers_time_and_the_rest() -> None:
    shape = {"batch_size": 1, "prompt_len": 1024, "num_speculative_tokens": 0}
    cases = [shape | {"num_layers": n, "round_ms": 1.25 + 0.25 * (n - 1)} for n in (3, 5)]
    (entry,) = per_layer(cases)
    assert entry["expert_layer_ms"] == 0.25
    assert entry["fixed_ms"] == 1.25
    assert entry["extrapolated_61_layers_ms"] == 16.25
    assert "kernels_a_layer" not in entry
    assert per_layer(cases[:1]) == []
    counted = [case | {"gpu": {"num_kernels": 30.0 + 19 * case["num_layers"]}} for case in cases]
    assert per_layer(counted)[0]["kernels_a_layer"] == 19


def test_masked_rounds_are_judged_beside_the_same_batch_without_and_left_out_of_layers() -> None:
    shape = {"batch_size": 16, "prompt_len": 1024, "num_speculative_tokens": 3, "num_layers": 5}
    plain = shape | {"round_ms": 10.0}
    cases = [plain | {"num_layers": 3, "round_ms": 7.0}, plain]
    cases += [
        plain | {"round_ms": ms, "num_masked": count, "masked_by": "grammar"}
        for count, ms in ((1, 11.0), (1, 11.1), (4, 12.0))
    ]
    verdicts = beside_verdicts(cases)
    assert [line.split(": ", 1)[1] for line in verdicts] == [
        "1.100 of the round without, at most 1.1 wanted: kept",
        "1.110 of the round without, at most 1.1 wanted: missed",
        "1.200 of the round without",
    ]
    assert beside_verdicts([case for case in cases if case["num_layers"] == 3]) == []
    looked_up = [plain | {"round_ms": ms, "matches": "0.5:24"} for ms in (9.0, 10.3)]
    assert [line.split(": ", 1)[1] for line in beside_verdicts([*looked_up, *cases])[:2]] == [
        "0.900 of the round without, at most 1.02 wanted: kept",
        "1.030 of the round without, at most 1.02 wanted: missed",
    ]
    assert per_layer(cases)[0]["expert_layer_ms"] == 1.5


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("nvjet_sm90_tst_128x8_64x12_2x1_v_bz_TNT", "dense products"),
        ("gate_up_sorted_kernel", "experts"),
        ("attend_hopper_kernel", "attention"),
        ("merge_kernel", "attention"),
        ("route_silu_down_kernel", "router"),
        ("force_acceptance_kernel", "sampling"),
        ("verify_kernel", "sampling"),
        ("add_rms_norm_kernel", "norms and activation"),
        ("Memcpy DtoD (Device -> Device)", "copies"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<int>>", "small tensor operations"),
        ("something_new", "other"),
    ],
)
def test_kernels_are_sorted_into_kinds(name: str, kind: str) -> None:
    assert kind_of(name) == kind


def test_time_without_a_kernel_is_told_by_the_kernels_around_it() -> None:
    """The second kernel starts early, the third runs inside the first, the fourth comes 2 us late."""
    intervals = [(0.0, 2.0, "first"), (1.0, 3.0, "second"), (0.5, 0.7, "inside"), (5.0, 6.0, "late")]
    found = coverage(intervals, num_rounds=2)
    assert found["covered_us"] == 2.0
    assert found["idle"] == [{"before": "second", "after": "late", "times": 0.5, "us": 1.0}]


def test_the_last_rounds_are_cut_out_of_a_run() -> None:
    """Rounds of 10 us whose kernel takes 7, after a prompt of 100: two of them, the last three left out."""
    rounds = [(100.0 + 10 * i, 107.0 + 10 * i, "round") for i in range(8)]
    found = last_rounds([(0.0, 100.0, "prompt"), *rounds], round_us=10.0, num_rounds=2)
    assert (found["round_us"], found["covered_us"]) == (10.0, 7.0)


def a_request(times_s: list[float], num_tokens: int, speculation: dict[str, int] | None) -> RequestTimes:
    statistics = {} if speculation is None else {"speculative_decoding": speculation}
    return RequestTimes(
        tuple(times_s), cast("Any", SimpleNamespace(statistics=statistics, num_output_tokens=num_tokens))
    )


def test_rounds_are_timed_over_responses_that_a_late_client_reads_together() -> None:
    """Rounds of 2 ms, every second response read with the next one; a draft's rounds are counted by the server."""
    times_s = [0.002 * (i - i % 2 + 2) for i in range(15)]
    assert rounds_ms(a_request(times_s, 15, None)) == pytest.approx([2.0] * 8)
    assert rounds_ms(a_request(times_s, 40, {"num_spec_steps": 14})) == pytest.approx([2.0] * 8)
    assert rounds_ms(a_request(times_s[:4], 4, None)) == []


def test_merged_responses_hold_several_rounds() -> None:
    """20 responses 4 ms apart with 2 tokens each: rounds of 2 ms."""
    assert rounds_ms(a_request([0.004 * i for i in range(20)], 40, None)) == pytest.approx([2.0] * 13)


def test_the_servers_share_is_what_its_runners_do_not_take() -> None:
    step = {"phase target": 3.5, "phase draft": 4.75, "phase commit": 0.25, "runner target": 3.0, "runner draft": 4.0}
    found = server_share(step, call_ms=0.25, num_calls=2)
    assert found["server_ms_by_cause"] == {"way to the target": 0.5, "way to the draft": 0.75, "commit": 0.25}
    assert (found["server_ms"], found["allowed_server_ms"]) == (1.5, 0.9)


@pytest.mark.parametrize(
    ("round_ms", "device", "cells"),
    [
        (2.0, "NVIDIA H100 80GB HBM3", "measured | 2.6 / 2.1: kept, aim reached"),
        (2.5, "NVIDIA H100 80GB HBM3", "measured | 2.6 / 2.1: kept"),
        (2.7, "NVIDIA H100 80GB HBM3", "measured | 2.6 / 2.1: **missed**"),
        (2.0, "NVIDIA H200", "2.5 to 3.0, estimated | 2.6 / 2.1: kept at the low end"),
    ],
)
def test_rounds_are_judged_on_an_h100_and_estimated_from_others(round_ms: float, device: str, cells: str) -> None:
    """An H200 that reads 1.5 times as fast; a floor of 1 ms there."""
    case = {"preset": "kimi-k2.5", "num_layers": 5, "batch_size": 1, "prompt_len": 1024, "num_speculative_tokens": 0}
    case |= {"device": device, "settings": {}, "draft": "", "floor_ms": 1.0, "read_bytes_per_us": 1.5 * 3.12e6}
    *_, line = judged_table([case | {"round_ms": round_ms}]).splitlines()
    assert f"| {cells} |" in line


def test_experts_of_many_rows_take_what_they_took_on_an_h100() -> None:
    """20 ms, 12 of them experts; beside them 4 of 8 ms are floor; 1.5 times the bandwidth."""
    case = {"num_layers": 5, "batch_size": 64, "num_speculative_tokens": 3, "round_ms": 20.0, "floor_ms": 12.0}
    case |= {"read_bytes_per_us": 1.5 * 3.12e6, "floor_by_part_ms": {"target: experts": 8.0}}
    assert on_an_h100(case) == (26.0, 30.0)
    low, high = on_an_h100(case | {"gpu": {"by_kind": {"experts": 12_000.0}}})
    assert (low, high) == pytest.approx((4 * 3.173 + 10.0, 4 * 3.173 + 12.0))


def test_the_floor_is_split_as_the_time_is() -> None:
    """Floors of 3 and 5 layers from runs of which the second read twice as fast: 1 ms a layer and 2 ms at its rate."""
    shape = {"batch_size": 1, "prompt_len": 1024, "num_speculative_tokens": 0, "round_ms": 1.0}
    cases = [
        shape | {"num_layers": 3, "floor_ms": 8.0, "read_bytes_per_us": 1e6},
        shape | {"num_layers": 5, "floor_ms": 6.0, "read_bytes_per_us": 2e6},
    ]
    (entry,) = per_layer(cases)
    assert (entry["expert_layer_floor_ms"], entry["fixed_floor_ms"]) == (1.0, 2.0)
    assert entry["extrapolated_floor_ms"] == 62.0


def test_a_draft_is_named_by_its_settings() -> None:
    assert draft_of({}) == "bf16"
    assert draft_of({"draft_quantization": "int4", "draft_vocab": 32_768}) == "int4, 32,768 tokens"
    assert draft_of({"draft_quantization": "fp8", "draft_head_quantization": "int4"}) == "fp8, its head int4"


def test_prompt_steps_are_measured_both_ways() -> None:
    """The eager way finds no captured step, and leaves the graphs as they were."""
    step = PromptStep.parse("40:2:24")
    assert step.rows(96, 24, 16).seq_lens.tolist() == [25, 25, 62]
    target, draft = runner_pair(Setting(kernels=KernelSet.plain()), "mla31", PlainRecorder())
    eager = []
    launch = target._launch_eagerly
    target._launch_eagerly = lambda plan: eager.append(len(plan.rows.token_ids)) or launch(plan)  # type: ignore[method-assign, func-returns-value]
    found = measure_prompt_step(target, draft, step, 2, 1)
    assert eager == [40] * NUM_TURNS * (1 + STEPS_A_TURN)
    assert min(found[way][part] for way in ("eager", "captured") for part in ("target_ms", "draft_ms")) > 0
    for text in ("4:4:8", "-5:1:1", "5"):
        with pytest.raises(ValueError, match="ROWS:DECODES:CONTEXT"):
            PromptStep.parse(text)


@pytest.mark.parametrize("num_ranks", [1, 4])
def test_a_tiny_slice_runs_through_the_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_ranks: int) -> None:
    """The slice runs as a whole, and as one of four ranks would run it."""
    batches = [1] if num_ranks == 1 else [2]
    command = ["slice.py", "--preset", "tiny", "--layers", "2,3", "--batches", ",".join(map(str, batches))]
    command += ["--rank-of", str(num_ranks), "--prompts", "40", "--tokens", "24", "--out", str(tmp_path)]
    command += ["--matches", "1:16"] if num_ranks == 1 else []
    monkeypatch.setattr(sys, "argv", command)
    runpy.run_path(str(REPOSITORY / "benchmarks/slice.py"), run_name="__main__")
    assert (tmp_path / "slice.png").stat().st_size > 0
    document = json.loads((tmp_path / "slice.json").read_text())
    assert len(document["cases"]) == (6 if num_ranks == 1 else 4)
    assert sum("matches" in case for case in document["cases"]) == (2 if num_ranks == 1 else 0)
    assert document["pretences"] == ["weights dummy", "routing uniform", "acceptance length synthetic 3"]
    assert {entry["batch_size"] for entry in document["per_layer"]} == set(batches)
    for case in document["cases"]:
        assert "error" not in case
        assert case["preset"] == ("tiny" if num_ranks == 1 else "tiny, one of 4 ranks")
        assert case["round_ms"] > 0
        expected = 3.0 if case["num_speculative_tokens"] else 1.0
        assert case["tokens_a_round"] == pytest.approx(expected, abs=1.0 if expected > 1 else 0)
