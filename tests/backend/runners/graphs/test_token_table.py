"""Draft tokens that only the token table has: the same bits as with ids in the reply, whichever way a runner takes."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from kimi_backend.errors import InvalidRequestError
from kimi_backend.runners.graphs.buckets import Bucket
from kimi_backend.runners.graphs.chunk_parts import ChunkParts
from kimi_backend.runners.graphs.draft_inputs import (
    extension_layout,
    fill_extension,
    fill_proposals,
    proposal_layout,
)
from kimi_backend.runners.graphs.static_arrays import Arena, StaticArrays
from kimi_backend.runners.row_arrays import RowArrays
from kimi_backend.runners.step_runner import Launched
from kimi_backend.scheduler.settings import SchedulerSettings
from kimi_backend.types.plan import DraftPlan, DraftReply, RowPlan, TargetPlan
from kimi_backend.types.request import GenerateRequest
from kimi_kernels.kernel_set import KernelSet
from kimi_kernels.synthetic_sets import with_synthetic_acceptance
from kimi_kernels.token_table import plain
from support.captured_runners import Setting, runner_pair
from support.engine_runs import EngineHarness
from support.plain_recorder import PlainRecorder
from support.random_requests import requests_of_every_k
from support.speculative_loop import SpeculativeLoop, Step

SETTING = Setting(kernels=KernelSet.plain())
ACCEPTING = Setting(kernels=with_synthetic_acceptance(KernelSet.plain(), 2.5, torch.device("cpu")))
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
        loop(*runner_pair(setting, kind, PlainRecorder()), texts, list(ks), in_table=in_table, **fields)
        for in_table in (False, True)
    ]


def assert_equal_steps(ids: Step, left: Step) -> None:
    """Everything in the target's reply is equal, and what is known of the draft's, which is nothing yet."""
    for name in ("seq_status", "output_token_ids", "num_accepted_tokens", "logprobs", "top_logprob_ids"):
        expected, found = getattr(ids.target_reply, name), getattr(left.target_reply, name)
        np.testing.assert_array_equal(found, expected, err_msg=name)


def assert_equal_aux(ids: Step, left: Step) -> None:
    """Rows whose draft tokens exist are equal bit for bit: so the rows embedded the same tokens."""
    assert torch.equal(ids.target_reply.aux.tensor, left.target_reply.aux.tensor)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["mla31", "mha"])
@pytest.mark.parametrize(("temperature", "ks"), [(1.0, [3]), (0.0, [1, 7, 2]), (1.0, [0, 4, 5, 1, 7, 2, 6])])
def test_the_same_bits(kind: str, temperature: float, ks: list[int]) -> None:
    loops = both_ways(ks, kind, temperature=temperature, seed=5)
    num_left = 0
    for _ in range(7):
        steps = [loop.step(12) for loop in loops]
        assert_equal_steps(*steps)
        assert_equal_aux(*steps)
        num_left += int((steps[1].target_plan.num_given < steps[1].target_plan.rows.query_lens).sum())
    assert num_left >= 4 * sum(k > 0 for k in ks)
    assert [s.token_ids for s in loops[0].sequences] == [s.token_ids for s in loops[1].sequences]
    assert [s.accepted for s in loops[0].sequences] == [s.accepted for s in loops[1].sequences]
    assert max(map(sum, (s.accepted for s in loops[1].sequences))) > 0


def test_sequences_that_leave_join_and_change_places() -> None:
    """A sequence keeps its row of the table, wherever it stands in the verify."""
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
                everyone[index].draft_token_ids, everyone[index].is_in_table = [], False
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
        monkeypatch.setattr(loop._target, "_launch_eagerly" if is_captured else "_launch_captured", None)
        if not is_captured:
            monkeypatch.setattr(loop._target._graphs, "find", lambda plan: None)  # type: ignore[attr-defined]
    for _ in range(4):
        assert_equal_steps(*(loop.step() for loop in loops))
    assert max(map(sum, (s.accepted for s in loops[1].sequences))) > 0


def test_a_draft_step_that_runs_as_it_comes_leaves_its_tokens_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a step is one whose draws want processors, or whose prompt does not end yet."""
    loops = both_ways([3, 1, 2])
    for loop in loops:
        monkeypatch.setattr(loop._draft._graphs, "proposal_bucket", lambda plan: None)  # type: ignore[union-attr]
    for _ in range(7):
        steps = [loop.step(12) for loop in loops]
        assert_equal_steps(*steps)
        assert steps[1].draft_reply is not None and steps[1].draft_reply.draft_token_ids is None
    assert max(map(sum, (s.accepted for s in loops[1].sequences))) > 0


def test_chunks_beside_verifies_run_eagerly() -> None:
    """A prompt of several chunks keeps the whole step out of the buckets while another sequence verifies."""
    texts = [prompts(1)[0], GENERATOR.integers(0, 96, 60).tolist()]
    loops = [
        SpeculativeLoop(*runner_pair(SETTING, "mla31", PlainRecorder()), texts, [3, 2], in_table=in_table)
        for in_table in (False, True)
    ]
    is_mixed = []
    for _ in range(8):
        steps = [loop.step(20) for loop in loops]
        assert_equal_steps(*steps)
        plan = steps[1].target_plan
        is_mixed.append(plan.reads_table and not plan.num_sampled_rows.all())
    assert any(is_mixed)


@pytest.mark.parametrize("failing_draw", [0, 1])
def test_a_failed_sequence_has_no_token_at_all(failing_draw: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its verify accepts nothing, and says of the draft what the draft's reply would have said."""
    target, draft = runner_pair(SETTING, "mla31", PlainRecorder())
    loop = SpeculativeLoop(target, draft, prompts(3), [2, 2, 2], in_table=True)
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
    assert target.table is not None
    proposed = target.table.proposed
    assert proposed[1, 1:4].tolist() == [1, -1, -1]
    assert (proposed[[0, 2], 2:4] >= 0).all()
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
    table = loops[1]._target.table  # type: ignore[attr-defined]
    table.proposed[:, 2:] = 2**30
    steps = [loop.step() for loop in loops]
    first = [step.target_reply.output_token_ids[:, 0].tolist() for step in steps]
    assert first[0] == first[1]
    assert steps[1].target_reply.num_accepted_tokens.tolist() == [0, 0]


def test_a_draft_step_that_is_not_the_one_asked_for_is_not_read() -> None:
    """One that was let go and comes late has its own stamp: its guesses are none, and it is told as one that failed."""
    loops = both_ways([2, 2], setting=SETTING)
    for _ in range(2):
        for loop in loops:
            loop.step()
    table = loops[1]._target.table  # type: ignore[attr-defined]
    table.proposed[0, 0] -= 1
    steps = [loop.step() for loop in loops]
    first = [step.target_reply.output_token_ids[:, 0].tolist() for step in steps]
    assert first[0] == first[1]
    assert steps[1].target_reply.num_accepted_tokens[0] == 0
    assert steps[1].target_reply.draft_status is not None
    assert steps[1].target_reply.draft_status.tolist() == [1, 0]


@pytest.mark.parametrize("is_captured", [True, False])
def test_host_given_proposals_beside_device_given_ones(is_captured: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first and third sequence's proposals come with the plan; those that the table holds for them are wrong."""
    loops = both_ways([3, 2, 1, 3])
    for _ in range(2):
        for loop in loops:
            loop.step()
    if not is_captured:
        for loop in loops:
            monkeypatch.setattr(loop._target._graphs, "find", lambda plan: None)  # type: ignore[attr-defined]
    table = loops[1]._target.table  # type: ignore[attr-defined]
    for index in (0, 2):
        sequence = loops[1].sequences[index]
        sequence.draft_token_ids = table.proposed[index, 2 : 2 + len(sequence.draft_token_ids)].tolist()
        sequence.is_in_table = False
        table.proposed[index, 2:] = 77
    steps = [loop.step() for loop in loops]
    plan = steps[1].target_plan
    assert plan.num_given.tolist() == [4, 1, 2, 1]
    assert_equal_steps(*steps)
    assert_equal_aux(*steps)
    assert steps[0].target_reply.num_accepted_tokens.sum() > 0


def test_what_fits_no_step_is_refused() -> None:
    target, draft = runner_pair(SETTING, "mla31", PlainRecorder())
    loop = SpeculativeLoop(target, draft, prompts(2), 2, in_table=True)
    loop.step()
    plan = loop._target_plan([s.next_rows(1) for s in loop.sequences])
    for wrong, message in (
        (
            replace(plan, num_given=np.array([0, 4], np.int32)),
            r"num_given\[1\]: 4 given, 0 to 3 \(of query_lens\) allowed",
        ),
        (replace(plan, num_given=np.array([0], np.int32)), r"num_given: shape \[1\] given, \[2\] allowed"),
        (replace(plan, table_rows=np.array([0], np.int32)), r"table_rows: shape \[1\] given, \[2\] allowed"),
        (replace(plan, table_rows=np.array([0, -1], np.int32)), r"table_rows\[1\]: -1 given, 0 to 7 allowed"),
    ):
        with pytest.raises(InvalidRequestError, match=message):
            target.launch(wrong)


def run_engine(kind: str, async_scheduling: bool, requests: list[GenerateRequest]) -> tuple[EngineHarness, list[bool]]:
    """Run to the end, over pools full of NaN; of each draft step, whether it was launched before its verify was
    done."""
    target, draft = runner_pair(ACCEPTING, kind, PlainRecorder())
    overlapped: list[bool] = []
    launch = draft.launch

    def counted(plan: DraftPlan) -> Launched[DraftReply]:
        overlapped.append(bool(plan.num_drawn.any()))
        return launch(plan)

    draft.launch = counted  # type: ignore[method-assign]
    settings = SchedulerSettings(max_num_seqs=6, max_num_batched_tokens=64, async_scheduling=async_scheduling)
    harness = EngineHarness(target, draft, settings, eos_token_ids={3})
    for request in requests:
        harness.add(request)
    harness.run()
    return harness, overlapped


@pytest.mark.parametrize("kind", ["mla31", "mha"])
def test_an_overlapped_draft_proposes_what_one_that_waits_does(kind: str) -> None:
    """Its accepted tokens, lengths, slots and noise are worked out on the device; the text is made of what it proposes,
    so one wrong number shows."""
    requests = requests_of_every_k(12, fewest_tokens=2)
    lockstep, never = run_engine(kind, False, requests)
    early, overlapped = run_engine(kind, True, requests)
    assert not any(never)
    assert sum(overlapped) > 12
    for waited, launched in zip(lockstep.outcomes, early.outcomes, strict=True):
        assert launched.token_ids == waited.token_ids
        assert launched.rounds == waited.rounds
    assert sum(accepted for outcome in early.outcomes for _, accepted in outcome.rounds) > 50


def test_numbers_worked_out_on_the_device() -> None:
    """Two sequences of a bucket of three; the second has room for two proposals if nothing is accepted."""
    rows, draws = Bucket.of(3, 4), Bucket.of(3, 1, 3)
    extension = StaticArrays(extension_layout(rows), Arena([extension_layout(rows)], torch.device("cpu")))
    proposals = StaticArrays(proposal_layout(draws), Arena([proposal_layout(draws)], torch.device("cpu")))
    table = np.array([[5, 6, 7], [8, 9, 10]], np.int32)
    loop = SpeculativeLoop(*runner_pair(SETTING, "mla31", None), [[1, 2, 3], [1, 2]], [3, 3])
    base = loop.step().draft_plan
    assert base is not None
    plan = replace(
        base,
        rows=RowPlan(
            token_ids=np.zeros(6, np.int32),
            query_lens=np.array([4, 2], np.int32),
            seq_lens=np.array([9, 7], np.int32),
            block_table=table,
        ),
        aux_rows=np.arange(6),
        num_proposals=np.array([3, 2], np.int32),
    )
    plan = replace(
        plan,
        table_rows=np.array([1, 2], np.int32),
        num_drawn=np.array([4, 2], np.int32),
        room=np.array([50, 2], np.int32),
        output_index=np.array([107, 7]),
    )
    drawn = torch.tensor([[0, 90, -1, -1, -1], [2, 41, 42, 43, -1], [1, 7, 8, -1, -1], [0] * 5], dtype=torch.int32)
    places = RowArrays.of(plan.rows, 4)
    fill_extension(extension.host, plan, places, ChunkParts.of(plan.rows, places, rows), 0, 3)
    fill_proposals(proposals.host, plan, 3)
    extension.upload()
    proposals.upload()
    static_table = torch.zeros((3, 3), dtype=torch.int32)
    static_table[:2] = torch.from_numpy(table)
    plain.read_drawn(extension.device, drawn, vocab_size=96)
    plain.plan_steps(proposals.device, static_table, drawn, block_size=4)
    assert extension.device["token_ids"][:6].tolist() == [41, 42, 43, 0, 7, 8]
    assert extension.device["last_rows"][:2].tolist() == [2, 5]
    # 5 tokens and 3 rows, then 5 tokens and 2 rows, of which room is left for one proposal.
    assert proposals.device["token_index"].tolist() == [[109, 8, 0], [110, 9, 0], [111, 10, 0]]
    assert proposals.device["is_wanted"].tolist() == [[1, 1, 0], [1, 0, 0], [1, 0, 0]]
    assert proposals.device["counts"].tolist() == [[1, 1, 0], [1, 0, 0], [1, 0, 0]]
    assert proposals.device["seq_lens"].tolist() == [[9, 7, 0], [10, 7, 0]]
    assert proposals.device["positions"].tolist() == [[8, 6, 0], [9, 6, 0]]
    assert proposals.device["slots"].tolist() == [[28, -1, -1], [29, -1, -1]]


@pytest.mark.parametrize("fault", ["last row", "token index", "slots", "tokens"])
def test_one_wrong_number_shows(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted faults in what is worked out on the device."""

    read_drawn, plan_steps = plain.read_drawn, plain.plan_steps

    def read_wrongly(step: dict[str, torch.Tensor], *args: Any, **sizes: Any) -> None:
        read_drawn(step, *args, **sizes)
        if fault == "last row":
            step["last_rows"].sub_(1).clamp_(min=0)
        elif fault == "tokens":
            step["token_ids"].zero_()

    def plan_wrongly(step: dict[str, torch.Tensor], *args: Any, **sizes: Any) -> None:
        plan_steps(step, *args, **sizes)
        if fault == "token index":
            step["token_index"].add_(1)
        elif fault == "slots":
            step["slots"].fill_(-1)

    requests = requests_of_every_k(8, fewest_tokens=2)
    lockstep, _ = run_engine("mla31", False, requests)
    monkeypatch.setattr(plain, "read_drawn", read_wrongly)
    monkeypatch.setattr(plain, "plan_steps", plan_wrongly)
    early, overlapped = run_engine("mla31", True, requests)
    assert any(overlapped)
    assert [o.token_ids for o in early.outcomes] != [o.token_ids for o in lockstep.outcomes]
