"""Chunks of prompts through static arrays, beside sequences that decode, against the same steps without: the same bits.
A replay is the recorded function itself; test_prompts_on_gpu.py replays CUDA graphs."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kimi_backend.runners.graphs import chunk_parts
from kimi_backend.types.plan import TargetPlan
from kimi_kernels.kernel_set import KernelSet
from support.captured_runners import Setting, runner_pair
from support.captured_steps import assert_equal_steps, step_in_order
from support.plain_recorder import PlainRecorder
from support.speculative_loop import SpeculativeLoop

SETTING = Setting(kernels=KernelSet.plain())
GENERATOR = np.random.default_rng(4)
LENGTHS = [3, 90, 41, 9]
"""One prompt of a verify's size, and three longer ones."""
ORDERS = ([0], [0, 1], [1, 2, 0], [3, 0, 2, 1], [0, 1, 2, 3], [2, 3], [1, 0, 3])
"""Prompts begin at different times, and leave and come back in another order."""


def prompts(lengths: list[int]) -> list[list[int]]:
    return [GENERATOR.integers(0, 96, length).tolist() for length in lengths]


def without_eager_steps(loop: SpeculativeLoop, monkeypatch: pytest.MonkeyPatch) -> SpeculativeLoop:
    for runner in (loop._target, loop._draft):
        monkeypatch.setattr(runner, "_launch_eagerly", None)
    return loop


@pytest.mark.parametrize("kind", ["mla31", "mha"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_chunks_beside_decodes_give_the_same_bits(
    kind: str, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks of prompts that go on are among them, which draw nothing."""
    texts = prompts(LENGTHS)
    plain, captured = (
        SpeculativeLoop(*runner_pair(SETTING, kind, recorder), texts, [3, 1, 7, 0], temperature=temperature, seed=5)
        for recorder in (None, PlainRecorder())
    )
    without_eager_steps(captured, monkeypatch)
    monkeypatch.setattr(captured._draft, "_extend", None)
    for order in ORDERS:
        assert_equal_steps(*(step_in_order(loop, order, chunk_size=33) for loop in (plain, captured)))
    pools = [loop._target._pool.tensor.nan_to_num(nan=7.0) for loop in (plain, captured)]  # type: ignore[attr-defined]
    assert bool((pools[0] == pools[1]).all())


def test_a_text_does_not_depend_on_how_its_prompt_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = prompts([70, 90, 81, 75])
    found = []
    for chunk_size in (9, 60):
        loop = SpeculativeLoop(*runner_pair(SETTING, "mla31", PlainRecorder()), texts, 3)
        found.append(without_eager_steps(loop, monkeypatch).run(95, chunk_size))
    assert all(other == found[0] for other in found)


class OneTokenLoop(SpeculativeLoop):
    """Every draw may be one token only: 40 and its row among the sampled ones."""

    def _target_plan(self, rows: list[list[int]]) -> TargetPlan:
        plan = super()._target_plan(rows)
        masked = np.arange(plan.num_sampled_rows.sum(), dtype=np.int32)
        masks = np.zeros((len(masked), 3), np.int32)
        masks[masked, (40 + masked) // 32] = 1 << (40 + masked) % 32
        return replace(plan, logit_mask=masks, masked_rows=masked)


def test_masks_reach_their_rows_beside_chunks_that_draw_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = OneTokenLoop(*runner_pair(SETTING, "mla31", PlainRecorder()), prompts([40, 3, 50, 20]), 0)
    reply = without_eager_steps(loop, monkeypatch).step(25).target_reply
    assert reply.output_token_ids.tolist() == [[40], [41]]
    assert reply.seq_status.tolist() == [0, 0, 0, 0]


class ScoredLoop(SpeculativeLoop):
    """Wants log-probabilities, which no graph holds."""

    def _target_plan(self, rows: list[list[int]]) -> TargetPlan:
        return replace(super()._target_plan(rows), num_logprobs=2)


def test_logprobs_follow_the_captured_layers_where_every_sequence_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = prompts([40, 3])
    loops = [
        ScoredLoop(*runner_pair(SETTING, "mla31", recorder), texts, [2, 1]) for recorder in (None, PlainRecorder())
    ]
    assert_equal_steps(*(loop.step(25) for loop in loops))
    monkeypatch.setattr(loops[1]._target, "_launch_eagerly", None)
    for _ in range(3):
        assert_equal_steps(*(loop.step(25) for loop in loops))


def test_a_sequence_whose_chunk_is_not_finite_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though it draws nothing yet."""
    loop = SpeculativeLoop(*runner_pair(SETTING, "mla31", PlainRecorder()), prompts([60, 3, 60]), 1)
    without_eager_steps(loop, monkeypatch).step(20)
    loop._target._pool.tensor[:, loop.sequences[2].target_blocks[0]] = float("nan")  # type: ignore[attr-defined]
    assert loop.step(20).target_reply.seq_status.tolist() == [0, 0, 1]


def test_a_chunk_over_too_many_keys_runs_eagerly(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bound is lowered: sequences are short here."""
    loop = SpeculativeLoop(*runner_pair(SETTING, "mla31", PlainRecorder()), prompts([60]), 1)
    monkeypatch.setattr(chunk_parts, "EVEN_ROWS", 20)
    num_heads = loop._target._model.num_heads  # type: ignore[attr-defined]
    monkeypatch.setattr(chunk_parts, "MOST_EXCESS", 10 * 35 * num_heads - 1)
    ran: list[int] = []
    launch = loop._target._launch_eagerly  # type: ignore[attr-defined]

    def counted(plan: TargetPlan) -> Any:
        ran.append(len(plan.rows.token_ids))
        return launch(plan)

    monkeypatch.setattr(loop._target, "_launch_eagerly", counted)
    for chunk_size in (20, 30, 20):
        loop.step(chunk_size)
    assert ran == [30]
