"""The formulas that the target and the drafts share, in plain differentiable torch.

They are those of `kimi_backend.layers`, without caches, pages or ranks: attention in the expanded form, over whole
windows. Matrices multiply in the compute dtype (bf16 on a GPU), the residual stream, norms, router and losses are
float32.

Dimensions: B windows, L tokens of each, T = B * L, H hidden, N heads, D = P + R head width of queries and keys
(P without position, R rotated), V head width of values, E experts, I expert width.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from kimi_backend.config.mla_dims import MlaDims

INT4_GROUP = 32
_INT4_STEPS = 7.5


def linear(x: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    return F.linear(x.to(dtype), weight.to(dtype))


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """float32."""
    x = x.float()
    return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps) * weight


def rotate(x: Tensor, cos_sin: Tensor, interleaved: bool) -> Tensor:
    """x: [..., R]. cos_sin: [..., R] float32, R / 2 cosines, then R / 2 sines; broadcasts against x."""
    cos, sin = cos_sin.chunk(2, dim=-1)
    wide = x.float()
    if interleaved:
        even, odd = wide[..., 0::2], wide[..., 1::2]
        turned = torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1).flatten(-2)
    else:
        first, second = wide.chunk(2, dim=-1)
        turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return turned.to(x.dtype)


def mla_queries_keys_values(
    x: Tensor, weights: dict[str, Tensor], cos_sin: Tensor, dims: MlaDims, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Multi-head latent attention up to the scores.

    Args:
        x: [T, H or 2H], normed.
        weights: q_a_proj, q_a_layernorm, q_b_proj, kv_a_proj_with_mqa, kv_a_layernorm, kv_b_proj.
        cos_sin: [T, R] float32 of each row's position.
    Returns:
        q, k: [T, N, D], the rotated part last. v: [T, N, V].
    """
    heads, nope, rope_dim = dims.num_attention_heads, dims.qk_nope_head_dim, dims.qk_rope_head_dim
    compressed = rms_norm(linear(x, weights["q_a_proj"], dtype), weights["q_a_layernorm"], eps)
    q = linear(compressed, weights["q_b_proj"], dtype).view(-1, heads, nope + rope_dim)
    kv_c, k_pe = linear(x, weights["kv_a_proj_with_mqa"], dtype).split([dims.kv_lora_rank, rope_dim], dim=-1)
    kv = linear(rms_norm(kv_c, weights["kv_a_layernorm"], eps), weights["kv_b_proj"], dtype)
    k_nope, v = kv.view(-1, heads, nope + dims.v_head_dim).split([nope, dims.v_head_dim], dim=-1)
    q_nope, q_pe = q.split([nope, rope_dim], dim=-1)
    angles = cos_sin[:, None]
    q = torch.cat((q_nope, rotate(q_pe, angles, dims.rope.interleaved)), dim=-1)
    k_pe = rotate(k_pe[:, None], angles, dims.rope.interleaved).expand(-1, heads, -1)
    return q, torch.cat((k_nope, k_pe), dim=-1), v


def causal_attention(q: Tensor, k: Tensor, v: Tensor, scale: float, length: int) -> Tensor:
    """q, k: [B * length, N, D], v: [B * length, N, V] -> [B * length, N * V]."""
    value_dim = v.shape[-1]
    if q.is_cuda:  # flash attention wants values as wide as keys
        v = F.pad(v, (0, q.shape[-1] - value_dim))
    q, k, v = (x.reshape(-1, length, *x.shape[1:]).transpose(1, 2) for x in (q, k, v))
    heads = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
    return heads[..., :value_dim].transpose(1, 2).flatten(2).flatten(0, 1)


def swiglu(x: Tensor, gate: Tensor, up: Tensor, down: Tensor, dtype: torch.dtype) -> Tensor:
    return linear(F.silu(linear(x, gate, dtype)) * linear(x, up, dtype), down, dtype)


def route(
    x: Tensor, gate: Tensor, bias: Tensor, top_k: int, renormalize: bool, scaling_factor: float
) -> tuple[Tensor, Tensor]:
    """Choose top_k experts by score + bias; weigh them by score alone.

    Returns:
        weights: [T, E] float32, 0 for experts not chosen.
        load: [E] float32, tokens that chose each.
    """
    scores = torch.sigmoid(F.linear(x.float(), gate.float()))
    chosen = torch.topk(scores.detach() + bias, top_k, dim=-1).indices
    mask = torch.zeros_like(scores).scatter(1, chosen, 1.0)
    weights = scores * mask
    if renormalize:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
    return weights * scaling_factor, mask.sum(dim=0)


def all_experts(x: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, dtype: torch.dtype) -> Tensor:
    """Every expert on every token, weighed: two large products, faster here than sorting tokens by expert.

    Args:
        weights: [T, E]. gate_up: [E, 2 * I, H], gate rows first. down: [E, H, I].
    """
    num_experts, double, hidden = gate_up.shape
    inner = linear(x, gate_up.view(-1, hidden), dtype).view(-1, num_experts, double)
    gate, up = inner.chunk(2, dim=-1)
    inner = F.silu(gate) * up * weights[:, :, None].to(dtype)
    return linear(inner.flatten(1), down.permute(1, 0, 2).reshape(hidden, -1), dtype)


def chosen_experts(x: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, dtype: torch.dtype) -> Tensor:
    """Do what `all_experts` does with each token's own experts only: less work, more steps; for CPUs, no gradient."""
    out = torch.zeros(x.shape, dtype=torch.float32)
    for expert in range(gate_up.shape[0]):
        rows = weights[:, expert].nonzero().flatten()
        gate, up = linear(x[rows], gate_up[expert], dtype).chunk(2, dim=-1)
        inner = F.silu(gate) * up * weights[rows, expert, None].to(dtype)
        out.index_add_(0, rows, linear(inner, down[expert], dtype).float())
    return out.to(dtype)


def fake_int4(weight: Tensor) -> Tensor:
    """`weight` rounded as `kimi_kernels.quantization.quantize_int4` rounds it; the gradient passes unchanged."""
    groups = weight.detach().unflatten(-1, (-1, INT4_GROUP))
    largest = groups.abs().amax(dim=-1, keepdim=True)
    scale = torch.where(largest > 0, largest / _INT4_STEPS, torch.ones_like(largest)).bfloat16().float()
    rounded = ((groups / scale).round().clamp(-8, 7) * scale).flatten(-2)
    shift: Tensor = (rounded - weight).detach()
    return weight + shift
