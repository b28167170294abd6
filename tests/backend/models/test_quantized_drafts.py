"""A quantised draft is the draft whose weights were rounded and widened again."""

from typing import Any

import pytest
import torch

from kimi_backend.config.linear_format import LinearFormat
from kimi_backend.layers.load_quantization import quantize
from kimi_backend.models.eagle3_draft import Eagle3Draft
from kimi_kernels import half_products
from kimi_kernels.quantization.plain import dequantize
from support.draft_steps import DraftSteps, build_draft
from support.reachable import storage_bytes
from support.target_steps import build_target
from support.tiny_checkpoints import Tensors, random_draft, random_target
from support.tiny_configs import draft_config, target_config

# A matrix that is stacked below another one starts where a float8 block starts, so that each can be rounded alone.
GEOMETRY: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 256, "q_lora_rank": 128, "vocab_size": 200}
MHA_GEOMETRY: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 256, "vocab_size": 200, "head_dim": 32}
TARGET = target_config(**GEOMETRY)
QUANTIZED = (LinearFormat.FP8, LinearFormat.INT4)


def rounded(tensors: Tensors, linear_format: LinearFormat) -> Tensors:
    """Linear layers rounded, one by one; what is no linear layer, or is taken apart into heads, as it is."""
    plain = ("kv_b_proj.weight", "embed_tokens.weight")
    return {
        name: dequantize(quantize(tensor, linear_format)) if tensor.ndim == 2 and not name.endswith(plain) else tensor
        for name, tensor in tensors.items()
    }


def run(draft: Eagle3Draft, **cache: Any) -> torch.Tensor:
    """Logits of a prompt, of an extension and of a row that reads its own feedback."""
    aux = torch.randn(9, 3 * 128, generator=torch.Generator().manual_seed(0))
    steps = DraftSteps(draft, [16], **cache)
    logits, feedback = [], torch.empty(0)
    for tokens, start in (([3, 1, 4, 1, 5], 0), ([9, 2, 6, 5], 5), ([3], 9)):
        hidden = draft.combine_aux(aux[start : start + len(tokens)]) if start < 9 else feedback
        step_logits, step_feedback = steps.step([(0, tokens)], [hidden])
        logits.append(step_logits[0])
        feedback = step_feedback[0][-1:]
    return torch.cat(logits)


def config_of(kind: str) -> Any:
    fields = {**MHA_GEOMETRY, "num_key_value_heads": 4} if kind == "mha" else GEOMETRY
    return draft_config(kind, TARGET, **fields, draft_vocab_size=150 if kind == "mha" else 200)


@pytest.mark.parametrize("kind", ["mla", "mla31", "mha"])
@pytest.mark.parametrize("linear_format", QUANTIZED)
def test_it_is_the_draft_of_rounded_weights(kind: str, linear_format: LinearFormat) -> None:
    config = config_of(kind)
    tensors = random_draft(config)
    quantized = run(build_draft(config, tensors, linear_format=linear_format))
    assert torch.equal(quantized, run(build_draft(config, rounded(tensors, linear_format))))
    plain = run(build_draft(config, tensors))
    assert not torch.equal(quantized, plain)
    error = (quantized - plain).square().mean().sqrt() / plain.square().mean().sqrt()
    assert error < (0.08 if linear_format is LinearFormat.FP8 else 0.25)


@pytest.mark.parametrize("kind", ["mla31", "mha"])
def test_a_float8_cache_changes_little_whatever_the_scale(kind: str) -> None:
    draft = build_draft(config_of(kind), random_draft(config_of(kind)))
    plain = run(draft)
    for kv_scale in (1.0, 0.25, 2.0):
        narrow = run(draft, dtype=torch.float8_e4m3fn, kv_scale=kv_scale)
        error = (narrow - plain).square().mean().sqrt() / plain.square().mean().sqrt()
        assert 0 < error < 0.05, kv_scale


@pytest.mark.parametrize("linear_format", QUANTIZED)
def test_the_targets_head_is_rounded_too_and_not_changed(linear_format: LinearFormat) -> None:
    config, target = config_of("mla"), random_target(TARGET)
    shared = build_target(TARGET, target).get_embed_and_head()
    draft = build_draft(config, random_draft(config, with_embed=False, with_head=False), linear_format=linear_format)
    draft.set_embed_and_head(shared)
    assert draft.get_embed_and_head().embed is shared.embed
    assert draft.get_embed_and_head().head is not shared.head
    x = torch.randn(4, 128, generator=torch.Generator().manual_seed(2))
    expected = dequantize(quantize(target["lm_head.weight"], linear_format))
    torch.testing.assert_close(draft.compute_logits(x), x @ expected.T)
    torch.testing.assert_close(shared.head.logits(x), x @ target["lm_head.weight"].T)


@pytest.mark.parametrize("with_head", [True, False])
def test_the_head_may_have_another_format(with_head: bool) -> None:
    config, target = config_of("mla"), random_target(TARGET)
    tensors = random_draft(config, with_head=with_head)
    head = tensors["lm_head.weight"] if with_head else target["lm_head.weight"]
    draft = build_draft(config, tensors, linear_format=LinearFormat.FP8, head_format=LinearFormat.INT4)
    draft.set_embed_and_head(build_target(TARGET, target).get_embed_and_head())
    layer = rounded(tensors, LinearFormat.FP8) | {"lm_head.weight": dequantize(quantize(head, LinearFormat.INT4))}
    assert torch.equal(run(draft), run(build_draft(config, layer)))


def test_only_a_plain_head_is_shared() -> None:
    config, target = config_of("mla"), random_target(TARGET)
    shared = build_target(TARGET, target).get_embed_and_head()
    own = random_draft(config, with_head=False)
    for layer, head in ((LinearFormat.INT4, LinearFormat.NONE), (LinearFormat.NONE, LinearFormat.INT4)):
        draft = build_draft(config, own, linear_format=layer, head_format=head)
        draft.set_embed_and_head(shared)
        assert (draft.get_embed_and_head().head is shared.head) == (head is LinearFormat.NONE)


def test_its_own_head_stays_its_own() -> None:
    config, target = config_of("mla"), random_target(TARGET)
    tensors = random_draft(config) | {"lm_head.weight": target["lm_head.weight"].clone()}
    draft = build_draft(config, tensors, linear_format=LinearFormat.INT4)
    head = draft.get_embed_and_head().head
    draft.set_embed_and_head(build_target(TARGET, target).get_embed_and_head())
    assert draft.get_embed_and_head().head is head


def test_the_weight_before_rounding_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(half_products, "is_available", lambda: False)
    config = config_of("mla")
    drafts = [
        build_draft(config, random_draft(config), linear_format=f) for f in (LinearFormat.INT4, LinearFormat.NONE)
    ]
    # What is packed is widened; only the unrounded head is missing.
    assert storage_bytes(drafts[1]) - storage_bytes(drafts[0]) == 200 * 128 * 4
