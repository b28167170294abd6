"""Each fault that speculation invites, planted once: the checks must report it. docs/testing.md lists them."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from kimi_backend.cache.hash_chain import DraftBlockKey
from kimi_backend.cache.kv_manager import KvManager, SequenceBlocks
from kimi_backend.cache.prefix_cache import PrefixCache
from kimi_backend.engine.commit import StepOutput
from kimi_backend.engine.emitter import Emitter
from kimi_backend.engine.request_output import RequestOutput
from kimi_backend.scheduler.penalty_counts import PenaltyCounts
from kimi_backend.scheduler.plan_builder import PlanBuilder
from kimi_backend.text.stop_strings import StopMatch, StopStringMatcher
from kimi_backend.types.plan import DraftPlan, Int32Array
from kimi_kernels.sampling.plain import sample_tokens, verify_draft_tokens
from kimi_kernels.sampling_inputs import SampleOutput, SamplingInputs, SamplingRows, VerifyOutput, VocabularyMap
from support import scripted_models
from support.check_errors import (
    AuxMismatchError,
    PoisonSpreadError,
    RejectedDraftError,
    StaleSlotError,
    WrongCountsError,
    WrongTextError,
    WrongTokensError,
)
from support.engine_checks import (
    check_equal_draft_is_always_accepted,
    check_poison_stays_alone,
    check_stop_strings,
    check_tokens,
)

Patch = pytest.MonkeyPatch


@pytest.mark.parametrize(
    "check", [check_tokens, check_equal_draft_is_always_accepted, check_poison_stays_alone, check_stop_strings]
)
def test_without_a_fault_every_check_passes(check: Callable[[], None]) -> None:
    check()


def plant_sampling(
    patch: Patch,
    change: Callable[[SamplingRows], SamplingRows],
    *,
    of_draft: bool,
    keep_map: bool = True,
) -> None:
    """Let one of the models sample with other rows than it was told to, or without its vocabulary map."""

    def planted(
        logits: torch.Tensor,
        inputs: SamplingInputs,
        rows: SamplingRows,
        vocabulary_map: VocabularyMap | None = None,
        num_logprobs: int | None = None,
    ) -> SampleOutput:
        if (vocabulary_map is not None) != of_draft:
            return sample_tokens(logits, inputs, rows, vocabulary_map, num_logprobs)
        if keep_map or vocabulary_map is None:
            return sample_tokens(logits, inputs, change(rows), vocabulary_map, num_logprobs)
        drawn = sample_tokens(logits, inputs, rows)
        return replace(drawn, token_ids=vocabulary_map.token_id_of_column[drawn.token_ids])

    patch.setattr(scripted_models, "sample_tokens", planted)


def test_accepting_one_token_too_many(monkeypatch: Patch) -> None:
    def planted(
        token_ids: torch.Tensor,
        status: torch.Tensor,
        first_row: torch.Tensor,
        draft_token_ids: torch.Tensor,
        num_draft_tokens: torch.Tensor,
    ) -> VerifyOutput:
        verified = verify_draft_tokens(token_ids, status, first_row, draft_token_ids, num_draft_tokens)
        accepted = torch.minimum(verified.num_accepted_tokens + 1, num_draft_tokens)
        tokens = token_ids[
            first_row[:, None] + torch.minimum(torch.arange(draft_token_ids.shape[1] + 1), accepted[:, None])
        ]
        return replace(verified, num_accepted_tokens=accepted, output_token_ids=tokens)

    monkeypatch.setattr(scripted_models, "verify_draft_tokens", planted)
    with pytest.raises(AuxMismatchError, match="not that of its own prefix"):
        check_tokens()
    with pytest.raises(WrongTokensError):
        check_tokens(checks_slots=False)


@pytest.mark.parametrize("shift", [-1, 1])
def test_a_wrong_noise_index_in_the_target(monkeypatch: Patch, shift: int) -> None:
    plant_sampling(monkeypatch, lambda rows: replace(rows, token_index=rows.token_index + shift), of_draft=False)
    with pytest.raises(WrongTokensError):
        check_tokens()


@pytest.mark.parametrize("shift", [-1, 1])
def test_a_wrong_noise_index_in_the_draft(monkeypatch: Patch, shift: int) -> None:
    plant_sampling(monkeypatch, lambda rows: replace(rows, token_index=rows.token_index + shift), of_draft=True)
    check_tokens()
    with pytest.raises(RejectedDraftError):
        check_equal_draft_is_always_accepted()


def test_noise_by_the_drafts_own_token_ids(monkeypatch: Patch) -> None:
    plant_sampling(monkeypatch, lambda rows: rows, of_draft=True, keep_map=False)
    with pytest.raises(RejectedDraftError):
        check_equal_draft_is_always_accepted()


def test_penalties_without_the_windows_prefix(monkeypatch: Patch) -> None:
    plant_sampling(
        monkeypatch, lambda rows: replace(rows, window_len=torch.zeros_like(rows.window_len)), of_draft=False
    )
    with pytest.raises(WrongTokensError):
        check_tokens()


def test_penalty_counts_that_forget_a_token(monkeypatch: Patch) -> None:
    add_output = PenaltyCounts.add_output
    monkeypatch.setattr(PenaltyCounts, "add_output", lambda self, ids: add_output(self, list(ids)[1:]))
    with pytest.raises(WrongTokensError):
        check_tokens()


def test_publishing_a_block_up_to_its_written_length(monkeypatch: Patch) -> None:
    publish = KvManager.publish

    def planted(
        self: KvManager, blocks: SequenceBlocks, token_ids: Int32Array, target_len: int, draft_len: int
    ) -> None:
        written = min(len(token_ids), len(blocks.target_ids) * self.block_size)
        publish(self, blocks, token_ids, written, draft_len)

    monkeypatch.setattr(KvManager, "publish", planted)
    monkeypatch.setattr("kimi_backend.engine.core.EngineCore._publish", _publish_always)
    with pytest.raises(StaleSlotError, match=r"^target: .* its row is not valid"):
        check_tokens()


def _publish_always(core: object, sequences: list[object]) -> None:
    for sequence in sequences:
        if sequence.blocks is not None:  # type: ignore[attr-defined]
            core.kv.publish(  # type: ignore[attr-defined]
                sequence.blocks,
                sequence.token_ids,
                sequence.target_len,
                sequence.publishable_draft_len,  # type: ignore[attr-defined]
            )


def test_a_draft_key_without_the_successor(monkeypatch: Patch) -> None:
    publish_draft, find_draft = PrefixCache.publish_draft, PrefixCache.find_draft

    def cut(key: DraftBlockKey) -> DraftBlockKey:
        return key[0], 0

    monkeypatch.setattr(PrefixCache, "publish_draft", lambda self, key, block: publish_draft(self, cut(key), block))
    monkeypatch.setattr(PrefixCache, "find_draft", lambda self, keys: find_draft(self, [cut(key) for key in keys]))
    with pytest.raises((AuxMismatchError, StaleSlotError), match=r"^draft: "):
        check_tokens()


def test_skipping_the_extension_over_accepted_rows(monkeypatch: Patch) -> None:
    """The draft keeps the rows of its single steps and only adds the last one."""
    resolved = DraftPlan.resolved

    def planted(self: DraftPlan, drawn: Int32Array, num_accepted: Int32Array) -> DraftPlan:
        plan = resolved(self, drawn, num_accepted)
        query_lens = plan.rows.query_lens
        has_begun = plan.rows.seq_lens > query_lens
        first_kept = np.where(has_begun, query_lens - 1, 0)
        place = np.arange(query_lens.sum()) - np.repeat(np.cumsum(query_lens) - query_lens, query_lens)
        is_kept = place >= np.repeat(first_kept, query_lens)
        rows = replace(plan.rows, token_ids=plan.rows.token_ids[is_kept], query_lens=query_lens - first_kept)
        return replace(plan, rows=rows, aux_rows=plan.aux_rows[is_kept])

    monkeypatch.setattr(DraftPlan, "resolved", planted)
    with pytest.raises(StaleSlotError, match=r"^draft: .* its row is not valid"):
        check_tokens()


def test_aux_hidden_states_of_the_next_position(monkeypatch: Patch) -> None:
    draft_plan = PlanBuilder.draft_plan

    def planted(self: PlanBuilder, *args: Any, **options: Any) -> DraftPlan:
        plan = draft_plan(self, *args, **options)
        return replace(plan, aux_rows=np.minimum(plan.aux_rows + 1, plan.aux_rows.max()))

    monkeypatch.setattr(PlanBuilder, "draft_plan", planted)
    with pytest.raises(AuxMismatchError, match="not that of its own prefix"):
        check_tokens()


def test_a_prefix_hit_of_the_target_alone(monkeypatch: Patch) -> None:
    """The draft follows the target's hit although its own blocks are missing."""
    take_cached = KvManager._take_cached

    def planted(self: KvManager, blocks: SequenceBlocks, token_ids: Int32Array, uses_draft: bool) -> None:
        take_cached(self, blocks, token_ids, uses_draft)
        if self.draft_pool is None or not uses_draft:
            return
        keys = blocks.chain.keys[: (len(token_ids) - 1) // self.block_size]
        more = self.prefix_cache.find_target(keys)[len(blocks.target_ids) :]
        self.target_pool.share(more)
        blocks.target_ids += more
        blocks.draft_ids += self.draft_pool.allocate(len(more))
        blocks.num_cached_tokens = len(blocks.target_ids) * self.block_size

    monkeypatch.setattr(KvManager, "_take_cached", planted)
    with pytest.raises(StaleSlotError, match=r"^draft: .* its row is not valid"):
        check_tokens()


def test_a_final_response_sent_twice(monkeypatch: Patch) -> None:
    def planted(self: Emitter, request_output: RequestOutput, output: StepOutput) -> None:
        """Sends what a stop string has ended again when the engine ends it too."""
        request_output.is_finished = False
        delta = request_output.push(output)
        assert delta is not None
        request_output.sink(delta)
        if output.finish is not None:
            del self._outputs[request_output.sequence.uid]

    monkeypatch.setattr(Emitter, "_emit", planted)
    with pytest.raises(AssertionError, match="final deltas at"):
        check_stop_strings()


def test_a_leaked_stop_text(monkeypatch: Patch) -> None:
    """The matcher lets text through that may still become a stop string."""
    push = StopStringMatcher.push

    def planted(self: StopStringMatcher, text: str) -> tuple[str, StopMatch | None]:
        _, match = push(self, text)
        return (text if match is None else ""), match

    monkeypatch.setattr(StopStringMatcher, "push", planted)
    with pytest.raises(WrongTextError):
        check_stop_strings()


def test_tokens_behind_a_stop_string_that_count(monkeypatch: Patch) -> None:
    push_text = RequestOutput._push_text

    def planted(self: RequestOutput, output: StepOutput) -> tuple[object, list[int]]:
        update, _ = push_text(self, output)
        return replace(update, num_tokens=len(output.token_ids)), output.token_ids

    monkeypatch.setattr(RequestOutput, "_push_text", planted)
    with pytest.raises(WrongCountsError):
        check_stop_strings()


def test_a_nan_row_that_poisons_its_neighbours(monkeypatch: Patch) -> None:
    def planted(
        logits: torch.Tensor,
        inputs: SamplingInputs,
        rows: SamplingRows,
        vocabulary_map: VocabularyMap | None = None,
        num_logprobs: int | None = None,
    ) -> SampleOutput:
        has_nan = logits.isnan().any(dim=1)
        spread = has_nan | has_nan.roll(1)
        return sample_tokens(
            logits.masked_fill(spread[:, None], float("nan")), inputs, rows, vocabulary_map, num_logprobs
        )

    monkeypatch.setattr(scripted_models, "sample_tokens", planted)
    with pytest.raises(PoisonSpreadError):
        check_poison_stays_alone()
