"""Draft tokens that never reach the host: the same bits as with ids in the reply, whichever way either runner takes."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from kimi_backend.errors import InvalidRequestError
from kimi_backend.runners.graphs.recorder import EagerRecorder
from kimi_backend.runners.left_tokens import left_places, window_rows
from kimi_backend.types.plan import TargetPlan, TokenHandle
from kimi_kernels.kernel_set import KernelSet
from kimi_kernels.pretending import with_synthetic_acceptance
from support.captured_runners import Setting, runner_pair
from support.speculative_loop import SpeculativeLoop, Step

SETTING = Setting(kernels=KernelSet.reference())
ACCEPTING = Setting(kernels=with_synthetic_acceptance(KernelSet.reference(), 2.5, torch.device("cpu")))
"""Draft tokens become the text: these models agree on none by themselves."""
GENERATOR = np.random.default_rng(7)


def prompts(count: int) -> list[list[int]]:
    return [GENERATOR.integers(0, 96, GENERATOR.integers(3, 20)).tolist() for _ in range(count)]


def both_ways(
    ks: list[int], kind: str = "mla31", loop: type = SpeculativeLoop, setting: Setting = ACCEPTING, **fields: Any
) -> list[SpeculativeLoop]:
    """[ids in the reply, tokens left on the device], over equal pairs of runners."""
    texts = prompts(len(ks))
    return [
        loop(*runner_pair(setting, kind, EagerRecorder()), texts, list(ks), launch_ahead=launch_ahead, **fields)
        for launch_ahead in (False, True)
    ]


def assert_equal_steps(ids: Step, left: Step) -> None:
    """Of the target's reply everything; of the draft's what is known, which is nothing yet."""
    for name in ("seq_status", "output_token_ids", "num_accepted_tokens", "logprobs", "top_logprob_ids"):
        expected, found = getattr(ids.target_reply, name), getattr(left.target_reply, name)
        np.testing.assert_array_equal(found, expected, err_msg=name)


def assert_equal_aux(ids: Step, left: Step) -> None:
    """Of rows whose draft tokens there are, bit for bit: so the rows embedded the same tokens."""
    assert torch.equal(ids.target_reply.aux.tensor, left.target_reply.aux.tensor)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["mla31", "mha"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("ks", [[3], [1, 7, 2], [0, 4, 5, 1, 7, 2, 6]])
def test_the_same_bits(kind: str, temperature: float, ks: list[int]) -> None:
    loops = both_ways(ks, kind, temperature=temperature, seed=5)
    num_left = 0
    for _ in range(7):
        steps = [loop.step(12) for loop in loops]
        assert_equal_steps(*steps)
        assert_equal_aux(*steps)
        num_left += steps[1].target_plan.draft_tokens.num_seqs
    assert num_left >= 4 * len(ks)
    assert [s.token_ids for s in loops[0].sequences] == [s.token_ids for s in loops[1].sequences]
    assert [s.accepted for s in loops[0].sequences] == [s.accepted for s in loops[1].sequences]
    assert max(map(sum, (s.accepted for s in loops[1].sequences))) > 0


def test_sequences_that_leave_join_and_change_places() -> None:
    """Columns are those of the draft's step, wherever a sequence stands in the verify."""
    loops = both_ways([3, 1, 2, 7])
    for loop in loops:
        loop.step()
    for order in ([0, 1, 2, 3], [2, 0, 3, 1], [3, 1], [1, 3]):
        steps = []
        for loop in loops:
            everyone = loop.sequences
            loop.sequences = [everyone[index] for index in order]
            steps.append(loop.step())
            loop.sequences = everyone
            for index in set(range(4)) - set(order):
                everyone[index].draft_token_ids, everyone[index].draft_column = [], -1
        assert_equal_steps(*steps)


class ProcessedLoop(SpeculativeLoop):
    """Penalties, a word that must not be, and log-probabilities: draws that read the window."""

    def _target_plan(self, rows: list[list[int]]) -> TargetPlan:
        plan = super()._target_plan(rows)
        count = len(plan.sampling.temperature)
        words = np.arange(count + 1, dtype=np.int32)
        penalized = replace(
            plan.sampling,
            repetition_penalty=np.full(count, 1.3, np.float32),
            presence_penalty=np.full(count, 0.5, np.float32),
            penalty_offsets=words,
            penalty_ids=np.full(count, 7, np.int32),
            penalty_counts=np.ones(count, np.int32),
            penalty_in_prompt=np.ones(count, np.bool_),
            bad_word_offsets=words,
            bad_word_token_offsets=2 * words,
            bad_word_tokens=np.tile(np.array([7, 9], np.int32), count),
            history_tail=np.full((count, 1), 7, np.int32),
        )
        return replace(plan, sampling=penalized, num_logprobs=2)


@pytest.mark.parametrize("is_captured", [True, False])
def test_draws_that_read_the_window(is_captured: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    loops = both_ways([3, 1, 2], loop=ProcessedLoop)
    for loop in loops:
        loop.step()
        monkeypatch.setattr(loop._target, "_verify_eagerly" if is_captured else "_verify_captured", None)
        if not is_captured:
            monkeypatch.setattr(loop._target._graphs, "bucket_of", lambda plan: None)  # type: ignore[attr-defined]
    for _ in range(4):
        assert_equal_steps(*(loop.step() for loop in loops))
    assert max(map(sum, (s.accepted for s in loops[1].sequences))) > 0


def test_chunks_beside_verifies_run_eagerly() -> None:
    """A prompt of several chunks keeps the whole step out of the buckets while another sequence verifies."""
    texts = [prompts(1)[0], GENERATOR.integers(0, 96, 60).tolist()]
    loops = [
        SpeculativeLoop(*runner_pair(SETTING, "mla31", EagerRecorder()), texts, [3, 2], launch_ahead=launch_ahead)
        for launch_ahead in (False, True)
    ]
    is_mixed = []
    for _ in range(8):
        steps = [loop.step(20) for loop in loops]
        assert_equal_steps(*steps)
        plan = steps[1].target_plan
        is_mixed.append(plan.draft_tokens.num_seqs > 0 and not plan.num_sampled_rows.all())
    assert any(is_mixed)


@pytest.mark.parametrize("failing_draw", [0, 1])
def test_a_failed_sequence_has_no_token_at_all(failing_draw: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its verify accepts nothing, and says of the draft what the draft's reply would have said."""
    target, draft = runner_pair(SETTING, "mla31", EagerRecorder())
    loop = SpeculativeLoop(target, draft, prompts(3), [2, 2, 2], launch_ahead=True)
    loop.step()
    loop.step()
    draws = []
    compute = draft._model.compute_logits

    def spoiled(normed: torch.Tensor) -> torch.Tensor:
        logits = compute(normed)
        if len(draws) == failing_draw:
            logits[1] = float("nan")
        draws.append(logits)
        return logits

    monkeypatch.setattr(draft._model, "compute_logits", spoiled)
    loop.step()
    monkeypatch.undo()
    left = draft._graphs.left  # type: ignore[union-attr]
    assert left[:3, 1].tolist() == [1, -1, -1]
    assert (left[1:3, [0, 2]] >= 0).all()
    step = loop.step()
    assert step.target_reply.draft_status is not None
    assert step.target_reply.draft_status.tolist() == [0, 1, 0]
    assert step.target_reply.num_accepted_tokens[1] == 0
    assert not step.target_reply.seq_status.any()


def test_a_token_that_is_none_is_never_embedded_as_such() -> None:
    """Whatever another process left: the verify runs, accepts nothing of it and draws what it would have drawn."""
    loops = both_ways([2, 2], setting=SETTING)
    for _ in range(2):
        for loop in loops:
            loop.step()
    left = torch.full((8, 8), 2**30, dtype=torch.int32)
    left[0] = 0
    loops[1]._left = TokenHandle(num_seqs=2, tensor=left)
    steps = [loop.step() for loop in loops]
    first = [step.target_reply.output_token_ids[:, 0].tolist() for step in steps]
    assert first[0] == first[1]
    assert steps[1].target_reply.num_accepted_tokens.tolist() == [0, 0]


def test_places_and_windows() -> None:
    """Two rows of a prompt, then a sequence of two draft tokens in column 3, then one whose token the plan has."""
    loop = SpeculativeLoop(*runner_pair(SETTING, "mla31", None), prompts(3), [2, 2, 1])
    plan = loop._target_plan([[1, 2], [3, 0, 0], [4, 5]])
    plan = replace(
        plan,
        num_sampled_rows=np.array([0, 3, 2], np.int32),
        draft_tokens=TokenHandle(num_seqs=4),
        draft_columns=np.array([-1, 3, -1], np.int32),
    )
    assert left_places(plan, 10).tolist() == [-1, -1, -1, 13, 23, -1, -1]
    assert window_rows(plan, 2).tolist() == [[3, 4], [6, -1]]


def test_what_fits_no_step_is_refused() -> None:
    target, draft = runner_pair(SETTING, "mla31", EagerRecorder())
    loop = SpeculativeLoop(target, draft, prompts(2), 2, launch_ahead=True)
    loop.step()
    plan = loop._target_plan([s.next_rows(1) for s in loop.sequences])
    assert plan.draft_columns is not None
    for wrong, message in (
        (replace(plan, draft_columns=None), r"draft_columns: none given, draft_tokens of 2 sequences"),
        (replace(plan, draft_tokens=TokenHandle()), r"draft_columns: some given, draft_tokens of 0 sequences"),
        (replace(plan, draft_columns=np.array([0, 2], np.int32)), r"draft_columns\[1\]: 2 given, -1 to 1 allowed"),
        (replace(plan, draft_columns=np.array([0], np.int32)), r"draft_columns: shape \[1\] given, \[2\] allowed"),
        (replace(plan, draft_tokens=TokenHandle(num_seqs=2)), r"draft_tokens.tensor: NoneType given"),
        (
            replace(plan, draft_tokens=TokenHandle(num_seqs=2, tensor=torch.zeros((2, 2), dtype=torch.int32))),
            r"draft_tokens.tensor: torch.int32 \[2, 2\] given, torch.int32 of at least \[3, 2\] is needed",
        ),
    ):
        with pytest.raises(InvalidRequestError, match=message):
            target.verify(wrong)
