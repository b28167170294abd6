"""Both models on the Triton-language kernels, in the interpreter, divided among 2, 4 and 8 ranks: against the reference
kernels on one rank, in float32. Of 32 heads two ranks have 16 each, as four of Kimi-K2.5's 64, and four 8, as eight."""

from typing import Any

import pytest
import torch

from kimi_backend.checkpoint.model_specs import target_tensor_specs
from kimi_backend.checkpoint.presets import Architecture, Preset, target_config_json
from kimi_backend.checkpoint.random_tensors import RandomTensors
from kimi_backend.checkpoint.tensor_source import InMemoryTensors
from kimi_backend.config.draft_config import DraftOverrides, Eagle3MlaDraftConfig
from kimi_backend.config.linear_format import LinearFormat
from kimi_backend.config.model_config import KimiModelConfig
from kimi_backend.config.quantization_config import QuantizationMethod
from kimi_backend.errors import CheckpointError
from kimi_backend.layers.moe import MOST_STACKED_ROWS_TOGETHER, MoeMlp
from kimi_backend.models.eagle3_draft import Eagle3Draft
from kimi_backend.models.eagle3_mha import Eagle3MhaDraft
from kimi_backend.models.eagle3_mla import Eagle3MlaDraft
from kimi_backend.models.kimi_k25 import KimiTarget, target_loader
from kimi_backend.parallel import SingleRank, TensorParallelGroup
from kimi_kernels.kernel_set import KernelSet
from support.draft_steps import DraftSteps
from support.interpreted import INTERPRETED
from support.lockstep_ranks import run_ranks
from support.target_steps import TargetSteps
from support.tiny_checkpoints import random_draft, random_target
from support.tiny_configs import draft_config, target_config

pytestmark = INTERPRETED
CPU = torch.device("cpu")
TOLERANCE = 1e-4
"""Relative to the largest value: orders of sums in float32."""
SPLITS = [6, 3, 1]
"""A prefill chunk, verify rows, a single row."""
AUX_LAYER_IDS = (1, 2)
GEOMETRY: dict[str, Any] = {"num_attention_heads": 32, "intermediate_size": 256, "vocab_size": 128}


def assert_close(ours: torch.Tensor, expected: torch.Tensor) -> None:
    assert ours.shape == expected.shape
    error = float((ours - expected).abs().max() / expected.abs().max())
    assert error < TOLERANCE, f"{error:.1e}"


def tokens() -> list[int]:
    drawn: list[int] = torch.randint(0, 128, (sum(SPLITS),), generator=torch.Generator().manual_seed(0)).tolist()
    return drawn


def test_target_on_four_ranks() -> None:
    config = target_config("int4", **GEOMETRY, num_hidden_layers=2, moe_intermediate_size=256)
    source = InMemoryTensors(random_target(config))

    def run(kernels: KernelSet, group: TensorParallelGroup) -> tuple[torch.Tensor, torch.Tensor]:
        target = KimiTarget(config, source, kernels, group, CPU, torch.float32)
        return TargetSteps(target, kernels, [sum(SPLITS)], aux_layer_ids=AUX_LAYER_IDS).run(tokens(), SPLITS)

    expected = run(KernelSet.plain(), SingleRank())
    for results in run_ranks(4, lambda group: run(KernelSet.triton(), group)):
        for ours, theirs in zip(results, expected, strict=True):
            assert_close(ours, theirs)


@pytest.mark.parametrize(("kind", "draft_vocab_size", "size"), [("mla", 128, 4), ("mla31", 128, 2), ("mha", 48, 8)])
def test_draft(kind: str, draft_vocab_size: int, size: int) -> None:
    """Logits, and the best token of the shards; the last kind has a reduced vocabulary."""
    target = target_config(**GEOMETRY, num_hidden_layers=2)
    heads = {"num_key_value_heads": 16, "num_attention_heads": 16} if kind == "mha" else {}
    config = draft_config(
        kind,
        target,
        DraftOverrides(aux_layer_ids=AUX_LAYER_IDS),
        **GEOMETRY | heads,
        draft_vocab_size=draft_vocab_size,
    )
    source = InMemoryTensors(random_draft(config))
    aux = torch.randn(sum(SPLITS), 2 * target.hidden_size, generator=torch.Generator().manual_seed(1))

    def run(kernels: KernelSet, group: TensorParallelGroup) -> tuple[torch.Tensor, torch.Tensor]:
        args = (source, kernels, group, CPU, torch.float32)
        draft: Eagle3Draft
        draft = (
            Eagle3MlaDraft(config, *args) if isinstance(config, Eagle3MlaDraftConfig) else Eagle3MhaDraft(config, *args)
        )
        steps = DraftSteps(draft, [sum(SPLITS)], kernels=kernels)
        logits, start = [], 0
        for count in SPLITS:
            hidden = draft.combine_aux(aux[start : start + count])
            logits += steps.step([(0, tokens()[start : start + count])], [hidden])[0]
            start += count
        normed = torch.randn(9, config.hidden_size, generator=torch.Generator().manual_seed(2))
        return torch.cat(logits), draft.argmax(normed)[1]

    expected, best = run(KernelSet.plain(), SingleRank())
    for found, our_best in run_ranks(size, lambda group: run(KernelSet.triton(), group)):
        assert_close(found, expected)
        assert torch.equal(our_best, best)


@pytest.mark.parametrize("linear_format", [LinearFormat.INT4, LinearFormat.FP8])
def test_a_draft_that_is_rounded_as_it_loads_is_the_same_on_two_ranks(linear_format: LinearFormat) -> None:
    """Slices begin where groups and blocks begin, so each rank rounds its part as one rank rounds the whole."""
    fields = GEOMETRY | {"hidden_size": 256, "v_head_dim": 16, "vocab_size": 256}
    target = target_config(**fields, num_hidden_layers=2)
    config = draft_config("mla", target, DraftOverrides(aux_layer_ids=AUX_LAYER_IDS), **fields, draft_vocab_size=256)
    assert isinstance(config, Eagle3MlaDraftConfig)
    source = InMemoryTensors(random_draft(config))
    normed = torch.randn(5, 256, generator=torch.Generator().manual_seed(2))
    aux = torch.randn(5, 512, generator=torch.Generator().manual_seed(1))

    def run(group: TensorParallelGroup) -> tuple[torch.Tensor, torch.Tensor]:
        draft = Eagle3MlaDraft(config, source, KernelSet.triton(), group, CPU, torch.float32, linear_format)
        return draft.compute_logits(normed), draft.combine_aux(aux)

    expected = run(SingleRank())
    for results in run_ranks(2, run):
        for ours, theirs in zip(results, expected, strict=True):
            assert_close(ours, theirs)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_attention_heads": 12}, "num_attention_heads: 12 elements do not divide among 8 ranks"),
        ({"intermediate_size": 100}, "100 elements do not divide among 8 ranks"),
        ({"moe_intermediate_size": 128}, "moe_intermediate_size: 128 elements .* in parts that are multiples of 32"),
        ({"vocab_size": 100}, "100 elements do not divide among 8 ranks"),
    ],
)
def test_what_does_not_divide_is_refused(fields: dict[str, Any], message: str) -> None:
    config = target_config("int4", **GEOMETRY | {"moe_intermediate_size": 256} | fields, num_hidden_layers=2)
    source = InMemoryTensors(random_target(config))
    with pytest.raises(CheckpointError, match=message):
        KimiTarget(config, source, KernelSet.plain(), SingleRank(rank=0, size=8), CPU, torch.float32)


@pytest.mark.parametrize("quantization", [QuantizationMethod.FP8, QuantizationMethod.NONE])
def test_experts_of_two_ranks(quantization: QuantizationMethod) -> None:
    """A layer of routed experts and the shared one, at the kernels' own block of 128: 128 of 256 columns a rank."""
    json = target_config_json(Preset.TINY, 2, quantization, Architecture.DEEPSEEK_V3, {})
    config = KimiModelConfig.from_hf_json(json | {"moe_intermediate_size": 256})
    source = RandomTensors(target_tensor_specs(config))
    few = 5
    x = torch.randn(MOST_STACKED_ROWS_TOGETHER + 1, config.hidden_size, generator=torch.Generator().manual_seed(0))

    def run(kernels: KernelSet, group: TensorParallelGroup) -> torch.Tensor:
        loader = target_loader(config, source, kernels, group, CPU, torch.float32)
        layer, sums = MoeMlp(loader.scoped("model.layers.1.mlp"), config), []
        for rows in (x[:few], x):
            terms = layer(rows)
            assert terms.second is not None, "the shared expert's"
            sums.append(kernels.sum_terms(terms.first, terms.second))
        return group.all_reduce(torch.cat(sums))

    expected = run(KernelSet.plain(), SingleRank())
    for found in run_ranks(2, lambda group: run(KernelSet.triton(), group)):
        assert_close(found, expected)
