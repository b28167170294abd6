"""The models on Triton-language kernels in bf16 against the plain kernels in float32, at Kimi's head widths.

Both have the same weights, so what differs is rounding: of activations and cached latents to bf16 (2^-9 relative each)
through three layers. Attention in the wrong place, a missing term or a wrong layout is off by 10 % and more.
"""

from typing import Any

import pytest
import torch

from kimi_backend.config.draft_config import DraftOverrides
from kimi_backend.config.linear_format import LinearFormat
from kimi_backend.config.model_config import KimiModelConfig
from kimi_kernels.kernel_set import KernelSet
from support.draft_steps import DraftSteps, build_draft
from support.naive_eagle3 import DraftConfig
from support.target_steps import TargetSteps, build_target
from support.tiny_checkpoints import Tensors, random_draft, random_target, with_biases
from support.tiny_configs import draft_config, target_config

pytestmark = pytest.mark.gpu

MAX_RMS_ERROR = 0.03
"""The bound for a row: RMS of its difference over RMS of the reference."""
GEOMETRY: dict[str, Any] = {
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "q_lora_rank": 512,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "intermediate_size": 2048,
    "vocab_size": 2048,
    "max_position_embeddings": 4096,
}
AUX_LAYER_IDS = (1, 2, 3)
# Prefill chunks, verify rows and single rows.
SPLITS = [200, 77, 8, 4, 1, 1, 9]


def large_target(quantization: str) -> KimiModelConfig:
    return target_config(
        quantization,
        **GEOMETRY,
        num_hidden_layers=3,
        moe_intermediate_size=256,
        # All experts: a rounded router score must not choose another one, which moves a row by far more than rounding.
        n_routed_experts=8,
        num_experts_per_tok=8,
    )


def in_bf16(tensors: Tensors) -> Tensors:
    """Floating-point tensors rounded to bf16, but for scales and what the file keeps in float32."""
    kept = ("scale_inv", "e_score_correction_bias")
    return {
        name: tensor.bfloat16() if tensor.dtype == torch.float32 and not name.endswith(kept) else tensor
        for name, tensor in tensors.items()
    }


def assert_close(ours: torch.Tensor, expected: torch.Tensor) -> None:
    assert ours.isfinite().all()
    row_errors = (ours.float() - expected).square().mean(dim=1).sqrt() / expected.square().mean().sqrt()
    worst = int(row_errors.argmax())
    assert row_errors[worst] < MAX_RMS_ERROR, f"row {worst}: RMS error {float(row_errors[worst]):.3f}"


def random_tokens(count: int) -> list[int]:
    tokens: list[int] = torch.randint(0, 2048, (count,), generator=torch.Generator().manual_seed(0)).tolist()
    return tokens


# The tiny fp8 files have blocks of 32, the kernels take 128: tests/kernels compare those.
@pytest.mark.parametrize("quantization", ["none", "int4", "mxfp4"])
@torch.inference_mode()
def test_target(quantization: str) -> None:
    config, device = large_target(quantization), torch.device("cuda")
    tensors, tokens = in_bf16(random_target(config)), random_tokens(sum(SPLITS))
    results = []
    for kernels, dtype in ((KernelSet.plain(), torch.float32), (KernelSet.triton(), torch.bfloat16)):
        target = build_target(config, tensors, kernels, device, dtype)
        steps = TargetSteps(
            target,
            kernels,
            [sum(SPLITS)],
            aux_layer_ids=AUX_LAYER_IDS,
            block_size=64,
            device=device,
            dtype=dtype,
        )
        results.append(steps.run(tokens, SPLITS))
    for ours, expected in zip(results[1], results[0], strict=True):
        assert_close(ours, expected)


def draft_of(kind: str, **fields: Any) -> DraftConfig:
    sizes = GEOMETRY if kind != "mha" else {**GEOMETRY, "num_key_value_heads": 16, "head_dim": 128}
    overrides = DraftOverrides(aux_layer_ids=AUX_LAYER_IDS)
    return draft_config(kind, large_target("none"), overrides, **{**sizes, "draft_vocab_size": 1024, **fields})


def compare_drafts(config: DraftConfig, tensors: Tensors, linear_format: LinearFormat) -> None:
    device, tokens = torch.device("cuda"), random_tokens(sum(SPLITS))
    aux = torch.randn(sum(SPLITS), 3 * 1024, generator=torch.Generator().manual_seed(1)).bfloat16()
    results = []
    for kernels, dtype in ((KernelSet.plain(), torch.float32), (KernelSet.triton(), torch.bfloat16)):
        draft = build_draft(config, tensors, kernels, device, dtype, linear_format)
        steps = DraftSteps(draft, [sum(SPLITS)], block_size=64, kernels=kernels, device=device, dtype=dtype)
        logits, start, feedback = [], 0, torch.empty(0)
        for size in SPLITS:
            # Single rows read what the row before fed back, others the target's states.
            hidden = feedback if size == 1 else draft.combine_aux(aux[start : start + size].to(device, dtype))
            step_logits, step_feedback = steps.step([(0, tokens[start : start + size])], [hidden])
            logits.append(step_logits[0])
            feedback, start = step_feedback[0][-1:], start + size
        results.append(torch.cat(logits))
    assert_close(results[1], results[0])


@pytest.mark.parametrize("linear_format", LinearFormat)
@pytest.mark.parametrize("kind", ["mla", "mla31", "mha"])
@torch.inference_mode()
def test_draft(kind: str, linear_format: LinearFormat) -> None:
    config = draft_of(kind)
    compare_drafts(config, in_bf16(random_draft(config)), linear_format)


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("mla31", {"num_hidden_layers": 2}),
        ("mha", {"num_hidden_layers": 2, "norm_before_residual": True}),
        ("mla", {"norm_before_fc": True, "q_lora_rank": None}),
        ("mha", {"norm_before_fc": True, "rope_scaling": {"type": "linear", "factor": 4.0}}),
    ],
)
@torch.inference_mode()
def test_forms_of_drafts(kind: str, fields: dict[str, Any]) -> None:
    """Several layers, a bias beside every matrix and norm, one norm over all aux states."""
    config = draft_of(kind, **fields)
    compare_drafts(config, in_bf16(with_biases(random_draft(config))), LinearFormat.NONE)
