"""A target whose next token depends on its last token alone, and a draft that knows the same: acceptance is what the
draft's head makes of it.

Target: no layer adds anything to the residual stream, so logits = head(norm(embed(t))). Draft: one Llama layer whose
attention sees its own row only and passes the normed embedding through; nothing of the hidden state reaches the head.
"""

import torch

from kimi_backend.config.draft_config import DraftOverrides, Eagle3MhaDraftConfig
from kimi_backend.config.model_config import KimiModelConfig
from support.tiny_checkpoints import Tensors, random_draft, random_target
from support.tiny_configs import draft_config

DRAFT_FIELDS = {
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "sliding_window": 1,
    "norm_before_residual": True,
}


def markov_target(config: KimiModelConfig) -> Tensors:
    tensors = random_target(config)
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensors[name] = torch.zeros_like(tensor)
    return tensors


def markov_draft_config(
    target: KimiModelConfig, overrides: DraftOverrides | None = None, **fields: object
) -> Eagle3MhaDraftConfig:
    config = draft_config("mha", target, overrides, **{**DRAFT_FIELDS, **fields})
    assert isinstance(config, Eagle3MhaDraftConfig)
    return config


def markov_draft(config: Eagle3MhaDraftConfig, target: Tensors, head_noise: float = 0.0) -> Tensors:
    """A draft that predicts as the target does, but for N(0, head_noise^2 / hidden_size) on each weight of its head.

    With a smaller vocabulary its head holds the target's rows of the tokens it has.
    """
    tensors = random_draft(config)
    eye, hidden = torch.eye(config.hidden_size), config.hidden_size
    tensors["embed_tokens.weight"] = target["model.embed_tokens.weight"]
    tensors["norm.weight"] = target["model.norm.weight"]
    tensors["layers.0.input_layernorm.weight"] = torch.ones(hidden)
    tensors["layers.0.hidden_norm.weight"] = torch.zeros(hidden)
    tensors["layers.0.self_attn.v_proj.weight"] = torch.cat([eye, torch.zeros_like(eye)], dim=1)
    tensors["layers.0.self_attn.o_proj.weight"] = eye
    tensors["layers.0.mlp.down_proj.weight"] = torch.zeros_like(tensors["layers.0.mlp.down_proj.weight"])
    head = target["lm_head.weight"]
    if "d2t" in tensors:
        head = head[tensors["d2t"] + torch.arange(config.draft_vocab_size)]
    noise = torch.randn(head.shape, generator=torch.Generator().manual_seed(9)) * hidden**-0.5
    tensors["lm_head.weight"] = head + head_noise * noise
    return tensors
