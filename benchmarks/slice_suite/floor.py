"""The least time that a round of a slice can take: bytes that it must read, over the card's read bandwidth.

Weights once a step, experts as often as uniform routing touches different ones, KV once a sequence and layer. What a
round computes stays below what it reads up to about 300 rows, so operations are left out. One of several ranks reads
its slices, and whole what every rank keeps: the first projections, the router and KV.
"""

from dataclasses import dataclass

from kimi_backend.checkpoint.model_specs import draft_tensor_specs, target_tensor_specs
from kimi_backend.config.draft_config import Eagle3MlaDraftConfig
from kimi_backend.config.linear_format import LinearFormat
from kimi_backend.config.model_config import KimiModelConfig
from kimi_backend.config.settings import ServingSettings
from kimi_backend.runners.load.draft_choice import head_format, linear_format

KV_ITEM_BYTES = 2
ON_EVERY_RANK = ("q_a_proj", "kv_a_proj", "norm", ".mlp.gate.", "e_score_correction_bias")
"""Parts of the names of tensors that ranks do not divide."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """A decode round of `batch_size` sequences of `context` tokens; k draft tokens each, 0 without speculation."""

    batch_size: int
    context: int
    num_draft_tokens: int

    @property
    def num_rows(self) -> int:
        return self.batch_size * (self.num_draft_tokens + 1)


def touched_experts(config: KimiModelConfig, num_rows: int) -> float:
    """Experts that uniform routing of so many tokens is expected to touch."""
    chance = config.num_experts_per_tok / config.n_routed_experts
    return config.n_routed_experts * (1 - (1 - chance) ** num_rows)


def target_bytes(config: KimiModelConfig, load: Load, num_ranks: int = 1) -> dict[str, float]:
    """Bytes that one of `num_ranks` reads for a verify, by part of the model."""
    parts = dict.fromkeys(("attention weights", "dense layer", "experts", "shared experts", "router", "head"), 0.0)
    share = touched_experts(config, load.num_rows) / config.n_routed_experts
    for name, spec in target_tensor_specs(config).items():
        num_bytes = spec.num_bytes / _num_slices(name, num_ranks)
        if ".mlp.experts." in name:
            parts["experts"] += num_bytes * share
        elif ".mlp.shared_experts." in name:
            parts["shared experts"] += num_bytes
        elif ".mlp.gate." in name:
            parts["router"] += num_bytes
        elif ".mlp." in name:
            parts["dense layer"] += num_bytes
        elif name.startswith("lm_head"):
            parts["head"] += num_bytes
        elif not name.startswith("model.embed_tokens"):
            parts["attention weights"] += num_bytes
    parts["KV"] = float(config.num_hidden_layers * load.batch_size * load.context * config.latent_dim * KV_ITEM_BYTES)
    return parts


def _num_slices(name: str, num_ranks: int) -> int:
    return 1 if any(part in name for part in ON_EVERY_RANK) else num_ranks


def draft_bytes(
    config: Eagle3MlaDraftConfig, settings: ServingSettings, load: Load, num_ranks: int = 1
) -> dict[str, float]:
    """Bytes that one of `num_ranks` reads for a proposal: the layer and the head k times, fc once."""
    k = load.num_draft_tokens
    if not k:
        return {}
    format_ = linear_format(settings)
    head_rows = min(settings.draft_vocab or config.draft_vocab_size, config.draft_vocab_size)
    layer = fc = 0.0
    for name, spec in draft_tensor_specs(config).items():
        if len(spec.shape) != 2 or name.startswith(("embed_tokens", "lm_head")):
            continue
        # kv_b is applied head by head, in the compute dtype.
        stays = format_ is LinearFormat.NONE or "kv_b_proj" in name
        num_bytes = (spec.num_bytes if stays else format_.num_bytes(*spec.shape, 2)) / _num_slices(name, num_ranks)
        if name.startswith("fc."):
            fc += num_bytes
        else:
            layer += num_bytes
    return {
        "fc": fc,
        "layer": k * layer,
        "head": k * head_format(settings).num_bytes(head_rows, config.hidden_size, 2) / num_ranks,
        "KV": float(k * load.batch_size * load.context * config.latent_dim * KV_ITEM_BYTES),
    }
