"""The memory plan against what the models really allocate, and its rules."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kimi_backend.checkpoint.loading import DraftCheckpoint, TargetCheckpoint
from kimi_backend.checkpoint.model_specs import draft_tensor_specs, target_tensor_specs
from kimi_backend.checkpoint.presets import Architecture, DraftKind, Preset, draft_config_json, target_config_json
from kimi_backend.checkpoint.random_tensors import RandomTensors
from kimi_backend.config import memory_plan
from kimi_backend.config.draft_config import Eagle3DraftConfig, Eagle3MhaDraftConfig, Eagle3MlaDraftConfig
from kimi_backend.config.linear_format import LinearFormat
from kimi_backend.config.memory_plan import GIB, RANKS_BYTES, MemoryPlan, MemorySettings, plan_memory
from kimi_backend.config.model_config import KimiModelConfig
from kimi_backend.config.quantization_config import QuantizationMethod
from kimi_backend.config.weight_sizes import WeightFormat, draft_weight_bytes, expert_bytes, target_weight_bytes
from kimi_backend.errors import ConfigError
from kimi_backend.layers.expert_weights import load_experts
from kimi_backend.layers.weight_loader import WeightLoader
from kimi_backend.models.eagle3_draft import Eagle3Draft
from kimi_backend.models.eagle3_mha import Eagle3MhaDraft
from kimi_backend.models.eagle3_mla import Eagle3MlaDraft
from kimi_backend.models.kimi_k25 import KimiTarget
from kimi_backend.parallel import SingleRank
from kimi_kernels import KernelSet
from support.checkpoint_folders import make_tiny
from support.device_kernels import device_kernel_set
from support.family_configs import DRAFT_FAMILIES, kimi_k25, mha_draft, text_config
from support.reachable import storage_bytes

CPU = torch.device("cpu")
KERNELS = device_kernel_set()
K25 = KimiModelConfig.from_hf_json(kimi_k25())
MLA_DRAFT = Eagle3DraftConfig.from_hf_json(DRAFT_FAMILIES["k2.5-eagle3-mla"], K25)
MHA_DRAFT = Eagle3DraftConfig.from_hf_json(mha_draft([2, 30, 58]), K25)
CPU_FORMAT = WeightFormat(item_bytes=4, widens_matrices=True)


def tiny_target(quantization: QuantizationMethod, **changes: Any) -> KimiModelConfig:
    json = target_config_json(Preset.TINY, 3, quantization, Architecture.DEEPSEEK_V3, {})
    return KimiModelConfig.from_hf_json(json | changes)


def build_target(
    config: KimiModelConfig, group: Any = None, kernels: KernelSet = KERNELS, dtype: torch.dtype = torch.float32
) -> KimiTarget:
    source = RandomTensors(target_tensor_specs(config))
    return KimiTarget(config, source, kernels, group or SingleRank(), CPU, dtype)


def build_draft(
    config: Eagle3MlaDraftConfig | Eagle3MhaDraftConfig,
    group: Any = None,
    kernels: KernelSet = KERNELS,
    dtype: torch.dtype = torch.float32,
) -> Eagle3Draft:
    source = RandomTensors(draft_tensor_specs(config))
    if isinstance(config, Eagle3MlaDraftConfig):
        return Eagle3MlaDraft(config, source, kernels, group or SingleRank(), CPU, dtype)
    return Eagle3MhaDraft(config, source, kernels, group or SingleRank(), CPU, dtype)


@pytest.mark.parametrize("quantization", QuantizationMethod)
def test_target_weights_are_what_the_model_allocates(quantization: QuantizationMethod) -> None:
    config = tiny_target(quantization)
    assert storage_bytes(build_target(config)) == target_weight_bytes(config, CPU_FORMAT)


@pytest.mark.parametrize(
    "changes",
    [{"q_lora_rank": None}, {"n_shared_experts": 2}, {"first_k_dense_replace": 3}],
    ids=str,
)
def test_variants_are_counted_too(changes: dict[str, Any]) -> None:
    config = tiny_target(QuantizationMethod.NONE, **changes)
    assert storage_bytes(build_target(config)) == target_weight_bytes(config, CPU_FORMAT)


@pytest.mark.parametrize("kind", DraftKind)
def test_draft_weights_are_what_the_model_allocates(kind: DraftKind) -> None:
    target = tiny_target(QuantizationMethod.NONE)
    config = Eagle3DraftConfig.from_hf_json(draft_config_json(kind, Preset.TINY, 3), target)
    draft = build_draft(config)
    draft.vocabulary_map = None  # a few kilobytes that the plan's overhead covers
    assert storage_bytes(draft) == draft_weight_bytes(config, CPU_FORMAT)


@pytest.mark.parametrize("quantization", [QuantizationMethod.NONE, QuantizationMethod.MXFP4])
def test_plain_kernels_of_a_gpu_hold_matrices_in_float32(
    quantization: QuantizationMethod, monkeypatch: pytest.MonkeyPatch
) -> None:
    for cpu_kind in ("pack_half", "_float_matrix"):
        monkeypatch.setattr(f"kimi_kernels.linear.plain.{cpu_kind}", lambda weight: None)
    plain, weights = KernelSet.plain(), WeightFormat(item_bytes=2, widens_matrices=True)
    config = tiny_target(quantization)
    target = build_target(config, kernels=plain, dtype=torch.bfloat16)
    assert storage_bytes(target) == target_weight_bytes(config, weights)
    for kind in DraftKind:
        draft_config = Eagle3DraftConfig.from_hf_json(draft_config_json(kind, Preset.TINY, 3), config)
        draft = build_draft(draft_config, kernels=plain, dtype=torch.bfloat16)
        draft.vocabulary_map = None  # a few kilobytes that the plan's overhead covers
        assert storage_bytes(draft) == draft_weight_bytes(draft_config, weights)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("quantization", QuantizationMethod)
def test_experts_are_as_large_as_their_stored_slices(quantization: QuantizationMethod, size: int) -> None:
    config = tiny_target(quantization)
    source = RandomTensors(target_tensor_specs(config))
    loader = WeightLoader(
        source, KERNELS, SingleRank(rank=size - 1, size=size), CPU, torch.bfloat16, fp8_block_size=128
    ).scoped("model.layers.1.mlp.experts")
    weights = load_experts(loader, config.n_routed_experts, config.hidden_size, config.moe_intermediate_size)
    assert storage_bytes(weights) == config.n_routed_experts * expert_bytes(config, WeightFormat(tp_size=size))


@pytest.mark.parametrize("size", [2, 8])
def test_each_of_several_ranks_holds_its_part(size: int) -> None:
    config = tiny_target(QuantizationMethod.NONE, num_attention_heads=8)
    expected = target_weight_bytes(config, WeightFormat(tp_size=size, item_bytes=4))
    for rank in (0, size - 1):
        assert storage_bytes(build_target(config, SingleRank(rank=rank, size=size))) == expected


@pytest.mark.parametrize("size", [2, 8])
@pytest.mark.parametrize("kind", DraftKind)
def test_each_of_several_ranks_holds_its_part_of_a_draft(kind: DraftKind, size: int) -> None:
    """Weights, and a block of its pool: an MLA draft's latents are on every rank, an MHA draft's heads divided."""
    target = tiny_target(QuantizationMethod.NONE, num_attention_heads=8)
    json = draft_config_json(kind, Preset.TINY, 3) | {"num_attention_heads": 8}
    config = Eagle3DraftConfig.from_hf_json(
        json | ({"num_key_value_heads": 8} if kind is DraftKind.MHA else {}), target
    )
    draft = build_draft(config, SingleRank(rank=size - 1, size=size))
    draft.vocabulary_map = None  # a few kilobytes that the plan's overhead covers
    assert storage_bytes(draft) == draft_weight_bytes(config, WeightFormat(tp_size=size, item_bytes=4))
    block = torch.empty(draft.kv_pool_shape(1, 64))
    assert block.nbytes == 64 * config.kv_bytes_per_token("float32", size)


@pytest.mark.parametrize("tp_size", [1, 2, 8])
def test_ranks_also_hold_gathered_logits_and_buffers(tp_size: int) -> None:
    """They are there beside what divides: all columns rank by rank, and each rank's own, in the steps that are captured
    and others."""
    settings = MemorySettings(gpu_bytes=2000 * GIB, tp_size=tp_size, max_num_sampled_rows=256)
    more = MemorySettings(gpu_bytes=2000 * GIB, tp_size=tp_size, max_num_sampled_rows=512)
    plans = [plan_memory(K25, None, given) for given in (settings, more)]
    logits = 256 * K25.vocab_size * 4
    copies = 5 if tp_size == 1 else 5 + 2 * (1 + 1 / tp_size)
    added = plans[1].activation_bytes - plans[0].activation_bytes
    assert logits * copies <= added < logits * copies + 256 * 1_000_000  # and the rows of larger captured steps
    without = plan_memory(K25, None, replace(settings, ranks_bytes=0))
    assert plans[0].activation_bytes - without.activation_bytes == (RANKS_BYTES if tp_size > 1 else 0)


@pytest.mark.parametrize("kind", DraftKind)
def test_pools_are_as_large_as_planned(kind: DraftKind, tmp_path: Path) -> None:
    folder = make_tiny(tmp_path / "out", QuantizationMethod.INT4, kind)
    target = TargetCheckpoint.open(folder)
    draft = DraftCheckpoint.open(folder / "draft", target.config)
    settings = MemorySettings(
        gpu_bytes=64 << 20,
        weight_dtype="float32",
        kv_cache_dtype="float32",
        widens_matrices=True,
        overhead_bytes=0,
        max_num_batched_tokens=64,
        max_num_sampled_rows=64,
    )
    plan = plan_memory(target.config, draft.config, settings)
    models = build_target(target.config), build_draft(draft.config)
    pools = [
        torch.empty(models[0].kv_pool_shape(plan.num_target_blocks, 64)),
        torch.empty(models[1].kv_pool_shape(plan.num_draft_blocks, 64)),
    ]
    assert pools[0].nbytes == plan.target_kv_bytes
    assert pools[1].nbytes == plan.draft_kv_bytes
    used = storage_bytes(*models, *pools) + plan.activation_bytes
    maps = 0 if kind is not DraftKind.MHA else (2048 + 512) * 8
    assert used == plan.total_bytes + maps
    a_block = plan.block_size * (plan.target_kv_bytes_per_token + plan.draft_kv_bytes_per_token)
    assert 0 <= settings.gpu_bytes - plan.total_bytes < a_block


def test_k25_on_eight_large_cards() -> None:
    plan = plan_memory(K25, MLA_DRAFT, MemorySettings(gpu_bytes=140 * GIB, tp_size=8))
    down_projections, routers, rope = 61 * 2112 * 7168 * 2, 60 * 384 * 7168 * 2, 262144 * 64 * 4
    # 594.2 GB over eight cards, and what every card holds whole.
    whole = (down_projections + routers) * 7 // 8 + rope
    assert plan.target_weight_bytes == pytest.approx(594.2e9 / 8 + whole, rel=0.003)
    assert plan.target_kv_bytes_per_token == 70_272
    assert plan.draft_kv_bytes_per_token == 1_152
    assert plan.num_draft_blocks == plan.num_target_blocks
    assert plan.num_kv_tokens > 870_000


def test_k25_does_not_fit_one_card() -> None:
    with pytest.raises(ConfigError, match=r"the weights do not fit: 5\d\d\.\d\d GiB .* expected less than 140\.00 GiB"):
        plan_memory(K25, MLA_DRAFT, MemorySettings(gpu_bytes=140 * GIB))
    with pytest.raises(
        ConfigError, match=r"do not fit: 38\d\d\.\d\d GiB .*, or kernels 'triton': 'plain' holds matrices"
    ):
        plan_memory(K25, MLA_DRAFT, MemorySettings(gpu_bytes=140 * GIB, widens_matrices=True))


def test_an_mha_draft_costs_tokens() -> None:
    settings = MemorySettings(gpu_bytes=140 * GIB, tp_size=8)
    with_mla, with_mha = (plan_memory(K25, draft, settings).num_kv_tokens for draft in (MLA_DRAFT, MHA_DRAFT))
    without = plan_memory(K25, None, settings)
    assert with_mha < with_mla < without.num_kv_tokens
    assert (without.num_draft_blocks, without.draft_weight_bytes) == (0, 0)


def test_one_sequence_must_fit_both_pools() -> None:
    with pytest.raises(ConfigError, match=r"one sequence of max_model_len 262144 needs 4096 blocks in the target's KV"):
        plan_memory(K25, MLA_DRAFT, MemorySettings(gpu_bytes=90 * GIB, tp_size=8))
    shorter = MemorySettings(gpu_bytes=90 * GIB, tp_size=8, max_model_len=32768)
    assert plan_memory(K25, MLA_DRAFT, shorter).num_kv_tokens >= 32768
    with pytest.raises(ConfigError, match=r"needs 512 blocks in the draft's KV pool, found room for 100; lower max_mo"):
        plan_memory(
            K25,
            MLA_DRAFT,
            MemorySettings(gpu_bytes=90 * GIB, tp_size=8, max_model_len=32768, num_draft_blocks=100),
        )


def plan_or_refusal(*arguments: Any) -> MemoryPlan | ConfigError:
    try:
        return plan_memory(*arguments)
    except ConfigError as error:
        return error


@given(
    gib=st.integers(85, 200),
    block_size=st.sampled_from([16, 32, 64, 128]),
    draft=st.sampled_from([MLA_DRAFT, MHA_DRAFT]),
    dtype=st.sampled_from(["bfloat16", "float8_e4m3fn"]),
    num_draft_blocks=st.one_of(st.none(), st.integers(2048, 5000)),
)
def test_every_plan_keeps_its_rules(
    gib: int,
    block_size: int,
    draft: Eagle3MlaDraftConfig | Eagle3MhaDraftConfig,
    dtype: str,
    num_draft_blocks: int | None,
) -> None:
    settings = MemorySettings(
        gpu_bytes=gib * GIB,
        tp_size=8,
        block_size=block_size,
        kv_cache_dtype=dtype,
        max_model_len=16384,
        num_draft_blocks=num_draft_blocks,
    )
    plan = plan_or_refusal(K25, draft, settings)
    if isinstance(plan, ConfigError):
        assert re.search("max_model_len|do not fit", str(plan))
        return
    assert plan.total_bytes <= settings.gpu_bytes
    assert plan.num_kv_tokens >= 16384
    assert plan.num_draft_blocks == (num_draft_blocks or plan.num_target_blocks)
    assert plan == plan_memory(K25, draft, settings)  # both runners come to the same plan


@pytest.mark.parametrize(
    ("target", "draft", "settings", "message"),
    [
        (K25, None, {"tp_size": 3}, r"tp_size is 3, expected a divisor of num_attention_heads \(64\)"),
        (K25, None, {"tp_size": 64, "max_model_len": 16}, None),
        (
            KimiModelConfig.from_hf_json(kimi_k25(moe_intermediate_size=2080)),
            None,
            {"tp_size": 2},
            r"tp_size is 2, expected a divisor of moe_intermediate_size \(2080\) in multiples of 32",
        ),
        (K25, MHA_DRAFT, {"tp_size": 128}, r"tp_size is 128, expected a divisor of num_attention_heads"),
        (
            K25,
            Eagle3DraftConfig.from_hf_json(mha_draft([2, 30, 58], num_key_value_heads=4), K25),
            {"tp_size": 8},
            r"tp_size is 8, expected a divisor of draft num_key_value_heads \(4\)",
        ),
        (K25, None, {"max_model_len": 262145}, "max_model_len is 262145, expected at most 262144"),
        (
            K25,
            Eagle3DraftConfig.from_hf_json(mha_draft([2, 30, 58], max_position_embeddings=131072), K25),
            {"tp_size": 8, "max_model_len": 262145},
            "max_model_len is 262145, expected at most 262144, the target's",
        ),
        (K25, None, {"kv_cache_dtype": "int8"}, "kv_cache_dtype is 'int8', expected one of"),
        (
            K25,
            None,
            {"num_target_blocks": 10**6, "tp_size": 8},
            "num_target_blocks 1000000 and num_draft_blocks 0 take",
        ),
        (K25, None, {"block_size": 0}, "block_size is 0, expected an integer of at least 1"),
        (K25, None, {"gpu_bytes": -1}, "gpu_bytes is -1, expected an integer"),
        (K25, None, {"num_draft_blocks": True}, "num_draft_blocks is True, expected an integer"),
    ],
)
def test_what_cannot_be_planned_is_named(
    target: KimiModelConfig,
    draft: Eagle3MlaDraftConfig | Eagle3MhaDraftConfig | None,
    settings: dict[str, Any],
    message: str | None,
) -> None:
    def plan() -> MemoryPlan:
        return plan_memory(target, draft, MemorySettings(**{"gpu_bytes": 140 * GIB, **settings}))

    if message is None:
        assert plan().num_target_blocks > 0
        return
    with pytest.raises(ConfigError, match=message):
        plan()


@pytest.mark.parametrize(
    ("of_draft", "field", "unit"),
    [
        *((False, name, 1) for name in ("num_attention_heads", "intermediate_size", "vocab_size")),
        (False, "moe_intermediate_size", 32),
        *((True, name, 1) for name in ("num_attention_heads", "intermediate_size", "draft_vocab_size", "hidden_size")),
        (True, "num_key_value_heads", 1),
    ],
)
def test_whatever_ranks_share_must_divide(of_draft: bool, field: str, unit: int) -> None:
    """Into whole units, an odd number of them included, and no more; one rank takes anything."""

    def check(value: int, size: int) -> None:
        changed = {field: value}
        target, draft = (K25, replace(MHA_DRAFT, **changed)) if of_draft else (replace(K25, **changed), MHA_DRAFT)  # type: ignore[arg-type]
        memory_plan._check_divisible(target, draft, MemorySettings(gpu_bytes=GIB, tp_size=size))

    check(2 * 3 * unit, 2)
    check(2 * 3 * unit + 1, 1)
    name = f"draft {field}" if of_draft else field
    for value in {2 * 3 * unit + 1, 2 * 3 * unit + unit}:
        with pytest.raises(ConfigError, match=rf"^tp_size is 2, expected a divisor of {name} \({value}\)"):
            check(value, 2)


LEAST = dict.fromkeys(
    ("gpu_bytes", "tp_size", "block_size", "max_num_batched_tokens", "max_num_sampled_rows", "max_num_seqs"), 1
)
LEAST |= {"max_model_len": 0, "overhead_bytes": 0, "ranks_bytes": 0, "num_target_blocks": 1, "num_draft_blocks": 1}


@pytest.mark.parametrize(("field", "least"), LEAST.items())
def test_every_number_has_a_least(field: str, least: int) -> None:
    def settings(value: object) -> MemorySettings:
        return MemorySettings(**{"gpu_bytes": GIB, field: value})  # type: ignore[arg-type]

    assert getattr(settings(least), field) == least
    for value in (
        least - 1,
        True,
        float(least),
        None if field not in ("num_target_blocks", "num_draft_blocks") else "",
    ):
        with pytest.raises(ConfigError, match=f"^{field} is {value!r}, expected an integer of at least {least}$"):
            settings(value)


def test_dense_layers_may_be_of_any_number() -> None:
    config = KimiModelConfig.from_hf_json(text_config(first_k_dense_replace=61))
    one_less = KimiModelConfig.from_hf_json(text_config(first_k_dense_replace=60))
    weights = WeightFormat()
    grown = target_weight_bytes(one_less, weights) - target_weight_bytes(config, weights)
    experts = 384 * (expert_bytes(config, weights) + 7168 * 2 + 4)
    assert grown == experts + 3 * 7168 * (2048 - 18432) * 2


@pytest.mark.parametrize("linear_format", LinearFormat)
def test_a_quantised_draft_leaves_room_for_tokens(linear_format: LinearFormat) -> None:
    settings = MemorySettings(gpu_bytes=140 * GIB, tp_size=8, draft_format=linear_format)
    plan = plan_memory(K25, MLA_DRAFT, settings)
    # One rank's part of 1.84 G weights of linear layers, and the embedding in bf16.
    matrices = (MLA_DRAFT.draft_vocab_size * 7168 + 658.4e6) / 8 + 7 / 8 * 2112 * 14_336
    item = {LinearFormat.NONE: 2, LinearFormat.FP8: 132 / 128, LinearFormat.INT4: 72 / 128}[linear_format]
    rope, embedding = 262144 * 64 * 4, 163_840 * 7168 * 2 / 8
    assert plan.draft_weight_bytes == pytest.approx(matrices * item + embedding + rope, rel=0.01)


def test_a_head_of_another_format() -> None:
    rows, hidden = MLA_DRAFT.draft_vocab_size, MLA_DRAFT.hidden_size
    plain = draft_weight_bytes(MLA_DRAFT, WeightFormat())
    int4_head = draft_weight_bytes(MLA_DRAFT, WeightFormat(draft_head_format=LinearFormat.INT4))
    assert plain - int4_head == rows * hidden * 2 - LinearFormat.INT4.num_bytes(rows, hidden, 2)
    plain_head = WeightFormat(draft_format=LinearFormat.INT4, draft_head_format=LinearFormat.NONE)
    int4 = draft_weight_bytes(MLA_DRAFT, WeightFormat(draft_format=LinearFormat.INT4))
    assert draft_weight_bytes(MLA_DRAFT, plain_head) - int4 == plain - int4_head


def test_quantised_weights_that_are_widened_weigh_what_they_are_widened_to() -> None:
    plain, widened = WeightFormat(item_bytes=4), WeightFormat(widens_matrices=True, draft_format=LinearFormat.INT4)
    embeddings_and_norms = draft_weight_bytes(MLA_DRAFT, plain) - draft_weight_bytes(MLA_DRAFT, widened)
    assert 0 < embeddings_and_norms < 1.1 * 2 * MLA_DRAFT.vocab_size * MLA_DRAFT.hidden_size
