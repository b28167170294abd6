"""Starting values of an MLA draft that skip the slowest part of its training.

From random values a draft spends most of a short training finding out that the token it reads is its own row's: the
embedding reaches the residual stream through attention only, which at first averages over all rows. Two steps on a few
thousand rows of the target's states give a start that knows it:

1. Ridge regression of the target's final state at p + 1 on (aux states at p, embedding of the token at p + 1). The aux
   half becomes `fc`. The embedding half, cut to the rank of the latent, becomes the latent and the values of the first
   heads.
2. In those heads queries and keys are one projection of that latent, so that a row scores highest with rows that hold
   its own token: itself, and equal ones, which carry the same value. Embeddings are frozen, so training of `fc` cannot
   undo it.
"""

import torch
from torch import Tensor

from kimi_backend.config.draft_config import Eagle3MlaDraftConfig
from kimi_nano.drafts import NanoDraft
from kimi_nano.formulas import linear, rms_norm
from kimi_nano.target import NanoTarget

RIDGE = 1e-3
MATCH_GAIN = 2.5
"""The weight with which the carrying heads prefer rows of their own token."""


@torch.no_grad()
def align(draft: NanoDraft, target: NanoTarget, tokens: Tensor, dtype: torch.dtype) -> None:
    """Set the draft's weights.

    Args:
        tokens: [B, L] int64, windows of training text; some ten thousand tokens are enough.
    """
    config = draft.config
    if not isinstance(config, Eagle3MlaDraftConfig):
        raise ValueError(f"aligned start: {type(config).__name__} given, an MLA draft is needed")
    out = target.eager(tokens, dtype, config.aux_layer_ids)
    assert out.aux is not None
    eps, length = config.rms_norm_eps, tokens.shape[1] - 1
    aux = out.aux.view(*tokens.shape, -1)[:, :length]
    wanted = out.normed.view(*tokens.shape, -1)[:, 1:].flatten(0, 1)
    embedded = target.weight("model.embed_tokens.weight")[tokens[:, 1:]]
    e = rms_norm(embedded, draft.layer_weight("input_layernorm"), eps).flatten(0, 1)
    fused = _fused_inputs(draft, aux).flatten(0, 1)
    solution = _ridge(torch.cat((fused, e), dim=1), wanted)
    from_aux, from_token = solution.split([fused.shape[1], e.shape[1]], dim=1)
    draft.weight("fc.weight").copy_(from_aux)
    hidden = draft.combine_aux(aux, dtype)
    z = torch.cat((e, rms_norm(hidden, draft.layer_weight("hidden_norm"), eps).flatten(0, 1)), dim=1)
    _carry_token(draft, config, from_token, z)
    draft.layer_weight("mlp.down_proj").mul_(0.2)
    # The final norm undoes how sure the regression is; this scale gives it back.
    predicted = draft.start(length).step(embedded, hidden, dtype).normed.flatten(0, 1)
    scale = (predicted * wanted).sum() / predicted.square().sum()
    draft.weight("norm.weight").copy_(scale.expand_as(draft.weight("norm.weight")))


def _fused_inputs(draft: NanoDraft, aux: Tensor) -> Tensor:
    """Compute the inputs that `fc` multiplies."""
    if not draft.config.fc_norm:
        return aux
    parts = aux.unflatten(-1, (draft.config.num_aux_hidden_states, -1)).unbind(-2)
    norms = [draft.weight(f"fc_norm.{i}.weight") for i in range(len(parts))]
    return torch.cat([rms_norm(x, w, draft.config.rms_norm_eps) for x, w in zip(parts, norms, strict=True)], dim=-1)


def _ridge(x: Tensor, y: Tensor) -> Tensor:
    """[out, in] float32 that minimises |x W^T - y|^2 plus a little |W|^2."""
    x, y = x.double(), y.double()
    gram = x.T @ x
    gram += RIDGE * gram.diagonal().mean() * torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
    solution: Tensor = torch.linalg.solve(gram, x.T @ y).T.float()
    return solution


def _carry_token(draft: NanoDraft, config: Eagle3MlaDraftConfig, from_token: Tensor, z: Tensor) -> None:
    """Send the embedding through the latent into the first heads' values, each row seeing its own token."""
    u, s, vt = torch.linalg.svd(from_token)
    nope, value_dim, heads = config.qk_nope_head_dim, config.v_head_dim, config.num_attention_heads
    assert config.q_lora_rank is not None, "NanoDraft compresses queries"
    rank = min(config.kv_lora_rank, config.q_lora_rank, len(s), heads * value_dim)
    rows = s[:rank, None].sqrt() * vt[:rank]
    for name, bottom in (("kv_a_proj_with_mqa", config.kv_lora_rank), ("q_a_proj", rank)):
        weight = draft.layer_weight(f"self_attn.{name}")
        weight[:bottom] = 0
        weight[:rank, : rows.shape[1]] = rows
    latent = linear(z, draft.layer_weight("self_attn.kv_a_proj_with_mqa")[: config.kv_lora_rank], torch.float32)
    typical = latent.square().mean().sqrt()
    draft.layer_weight("self_attn.kv_a_layernorm").fill_(typical)
    kv_b = draft.layer_weight("self_attn.kv_b_proj").view(heads, nope + value_dim, config.kv_lora_rank)
    kv_b.div_(typical)
    q_b = draft.layer_weight("self_attn.q_b_proj").view(heads, config.qk_head_dim, -1)
    o_proj = draft.layer_weight("self_attn.o_proj").view(-1, heads, value_dim)
    o_proj.mul_(0.3)
    for head in range(-(-rank // value_dim)):
        first, last = head * value_dim, min((head + 1) * value_dim, rank)
        projection = torch.linalg.qr(torch.randn(rank, nope, device=z.device)).Q.T
        kv_b[head] = 0
        kv_b[head, :nope, :rank] = projection / typical
        kv_b[head, nope : nope + last - first, first:last] = torch.eye(last - first, device=z.device)
        q_b[head] = 0
        q_b[head, :nope, :rank] = MATCH_GAIN * projection
        o_proj[:, head] = 0
        o_proj[:, head, : last - first] = u[:, first:last] * s[first:last].sqrt()
