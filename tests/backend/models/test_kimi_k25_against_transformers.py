"""The target against the modelling code of the `transformers` library, which shares nothing with ours.

transformers 5 masks experts outside the chosen groups with -inf, as our router does (older versions used 0, which
differs only where fewer than num_experts_per_tok biased scores are positive). It norms the two latents with eps 1e-6
whatever the config says; the configs here say 1e-6 too.
"""

from typing import Any

import pytest
import torch

from kimi_backend.config.model_config import KimiModelConfig
from kimi_kernels.kernel_set import KernelSet
from support.target_steps import TargetSteps, build_target
from support.tiny_checkpoints import Tensors, dequantized, random_target
from support.tiny_configs import YARN, target_json
from support.transformers_target import transformers_model

MAX_RELATIVE_ERROR = 1e-4
NUM_TOKENS = 90

CASES: dict[str, dict[str, Any]] = {
    "yarn": {},
    "no yarn": {"rope_scaling": None},
    # A short original length and a high beta_fast put the ramp inside the frequencies that the prompt can tell apart.
    "yarn with a wide ramp, mscale without mscale_all_dim": {
        "qk_rope_head_dim": 32,
        "rope_scaling": {**YARN, "original_max_position_embeddings": 512, "mscale_all_dim": 0.0, "factor": 4.0},
        "max_position_embeddings": 2048,
    },
    "four groups, two chosen": {"n_routed_experts": 16, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 4},
    "three heads, three dense layers": {"num_attention_heads": 3, "first_k_dense_replace": 3, "num_hidden_layers": 5},
    "five heads, unequal head widths": {
        "num_attention_heads": 5,
        "qk_nope_head_dim": 32,
        "v_head_dim": 48,
        "hidden_size": 80,
    },
    "uncompressed queries": {"q_lora_rank": None},
    "two shared experts, scores not renormalised": {"n_shared_experts": 2, "norm_topk_prob": False},
    "Kimi's proportions": {
        "n_routed_experts": 48,
        "num_experts_per_tok": 8,
        "routed_scaling_factor": 2.827,
        "rope_theta": 50000.0,
        "rope_scaling": {**YARN, "factor": 64.0},
        "num_attention_heads": 8,
        "num_hidden_layers": 7,
    },
}


def assert_close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    error = (ours - theirs).abs().max() / theirs.abs().max()
    assert error < MAX_RELATIVE_ERROR, f"relative error {error:.2e}"


def compare(json: dict[str, Any], tensors: Tensors, seed: int) -> None:
    config, kernels = KimiModelConfig.from_hf_json(json), KernelSet.plain()
    num_layers = config.num_hidden_layers
    tokens = torch.randint(0, config.vocab_size, (NUM_TOKENS,), generator=torch.Generator().manual_seed(seed))
    with torch.inference_mode():
        library = transformers_model(json, dequantized(tensors))
        theirs = library(tokens[None], output_hidden_states=True)
        steps = TargetSteps(
            build_target(config, tensors), kernels, [NUM_TOKENS], aux_layer_ids=tuple(range(num_layers + 1))
        )
        logits, aux = steps.run(tokens.tolist(), [NUM_TOKENS])
    assert_close(logits, theirs.logits[0])
    *entering_each, leaving = aux.chunk(num_layers + 1, dim=1)
    for layer, entering in enumerate(entering_each):
        assert_close(entering, theirs.hidden_states[layer][0])
    # The library shows the last layer's output after the final norm only.
    normed = torch.nn.functional.rms_norm(leaving, leaving.shape[1:], tensors["model.norm.weight"], 1e-6)
    assert_close(normed, theirs.hidden_states[num_layers][0])


@pytest.mark.parametrize("case", CASES)
def test_logits_and_entering_hidden_states_match(case: str) -> None:
    json = target_json(**CASES[case])
    compare(json, random_target(KimiModelConfig.from_hf_json(json), seed=3), seed=5)


@pytest.mark.parametrize("quantization", ["int4", "fp8", "mxfp4", "mxfp4 and fp8", "mxfp4 packed"])
def test_a_quantized_checkpoint_matches_its_dequantized_weights(quantization: str) -> None:
    json = target_json(quantization)
    compare(json, random_target(KimiModelConfig.from_hf_json(json), seed=4), seed=6)
