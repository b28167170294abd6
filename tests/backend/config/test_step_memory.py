"""The memory that the plan counts for steps grows with what steps grow with."""

from dataclasses import replace

import pytest

from kimi_backend.config.draft_config import Eagle3DraftConfig, Eagle3MhaDraftConfig, Eagle3MlaDraftConfig
from kimi_backend.config.memory_plan import GIB, MemorySettings, plan_memory
from kimi_backend.config.model_config import KimiModelConfig
from kimi_backend.config.step_memory import StepSizes, draft_step_bytes, target_step_bytes
from kimi_backend.config.weight_sizes import WeightFormat
from kimi_kernels.moe_experts.scratch import moe_scratch_bytes
from support.family_configs import DRAFT_FAMILIES, kimi_k25, mha_draft

K25 = KimiModelConfig.from_hf_json(kimi_k25())
MLA_DRAFT = Eagle3DraftConfig.from_hf_json(DRAFT_FAMILIES["k2.5-eagle3-mla"], K25)
MHA_DRAFT = Eagle3DraftConfig.from_hf_json(mha_draft([2, 30, 58]), K25)
WEIGHTS = WeightFormat()
SIZES = StepSizes(max_num_batched_tokens=2048, max_num_sampled_rows=256, max_num_seqs=64)


def test_captured_logits_are_kept_beside_eager_ones() -> None:
    more = replace(SIZES, max_num_sampled_rows=257)
    a_row = K25.vocab_size * (1 + 3 + 1) * 4
    difference = target_step_bytes(K25, 3, WEIGHTS, more) - target_step_bytes(K25, 3, WEIGHTS, SIZES)
    assert a_row < difference < a_row + 64 * K25.hidden_size * 2


def test_what_scores_are_made_of_is_counted_nine_times() -> None:
    """64 rows of float32, where a step draws fewer."""
    few = StepSizes(max_num_batched_tokens=8, max_num_sampled_rows=1, max_num_seqs=1, captures=False)
    wider = replace(K25, vocab_size=2 * K25.vocab_size)
    difference = target_step_bytes(wider, 3, WEIGHTS, few) - target_step_bytes(K25, 3, WEIGHTS, few)
    assert difference == 64 * K25.vocab_size * 4 * 9


def test_without_graphs_a_step_takes_less() -> None:
    eager = replace(SIZES, captures=False)
    assert target_step_bytes(K25, 3, WEIGHTS, eager) < target_step_bytes(K25, 3, WEIGHTS, SIZES)
    assert draft_step_bytes(MLA_DRAFT, WEIGHTS, eager) < draft_step_bytes(MLA_DRAFT, WEIGHTS, SIZES)


def test_a_rank_of_few_heads_captures_longer_prompts() -> None:
    """All of a step's 2,048 rows, of which each needs what an eager one does; with every head as many as a verify."""
    assert [SIZES.num_captured_rows(heads) for heads in (64, 16, 8, None)] == [256, 1024, 2048, 2048]
    weights, eager = WeightFormat(tp_size=8), replace(SIZES, captures=False)
    longer = replace(eager, max_num_batched_tokens=2 * SIZES.max_num_batched_tokens)
    for step_bytes, model in ((target_step_bytes, (K25, 0)), (draft_step_bytes, (MLA_DRAFT,))):
        once, twice, captured = (step_bytes(*model, weights, sizes) for sizes in (eager, longer, SIZES))  # type: ignore[operator]
        assert captured - once >= twice - once


def test_a_row_of_experts_and_aux_hidden_states_is_counted() -> None:
    rows = 2 * SIZES.max_num_batched_tokens
    longer = replace(SIZES, max_num_batched_tokens=rows)
    difference = target_step_bytes(K25, 3, WEIGHTS, longer) - target_step_bytes(K25, 3, WEIGHTS, SIZES)
    experts = K25.num_experts_per_tok * K25.hidden_size * 2
    assert difference >= SIZES.max_num_batched_tokens * (experts + 2 * 3 * K25.hidden_size * 2)


@pytest.mark.parametrize("tp_size", [1, 8])
@pytest.mark.parametrize("num_rows", [512, 8192])
def test_the_experts_kernels_fit_what_a_step_is_given(num_rows: int, tp_size: int) -> None:
    """The plan knows no kernels, so that the engine's side can evaluate it; here its word is held against theirs."""
    fewer, more = (replace(SIZES, captures=False, max_num_batched_tokens=rows) for rows in (1, num_rows + 1))
    weights = WeightFormat(tp_size=tp_size)
    rows = target_step_bytes(K25, 0, weights, more) - target_step_bytes(K25, 0, weights, fewer)
    scratch = moe_scratch_bytes(
        num_rows, K25.num_experts_per_tok, K25.n_routed_experts, K25.hidden_size, K25.moe_intermediate_size // tp_size
    )
    assert scratch < rows < 2 * scratch


@pytest.mark.parametrize("draft", [MLA_DRAFT, MHA_DRAFT])
def test_a_draft_adds_its_own(draft: Eagle3DraftConfig) -> None:
    settings = MemorySettings(gpu_bytes=140 * GIB, tp_size=8)
    with_draft, without = (plan_memory(K25, each, settings).activation_bytes for each in (draft, None))  # type: ignore[arg-type]
    aux = 3 * K25.hidden_size * 2
    assert with_draft - without > settings.max_num_batched_tokens * 4 * aux


@pytest.mark.parametrize("draft", [MLA_DRAFT, MHA_DRAFT], ids=["mla", "mha"])
def test_a_drafts_pool_is_float8_beside_a_float8_target(draft: Eagle3MlaDraftConfig | Eagle3MhaDraftConfig) -> None:
    settings = MemorySettings(gpu_bytes=140 * GIB, tp_size=8, kv_cache_dtype="float8_e4m3fn")
    planned = plan_memory(K25, draft, settings).draft_kv_bytes_per_token
    assert 2 * planned == 2 * draft.kv_bytes_per_token("float8_e4m3fn", 8) == draft.kv_bytes_per_token("bfloat16", 8)
