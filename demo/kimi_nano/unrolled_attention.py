"""Attention of an unrolled draft: the rows of step 0 up to each start, and each start's own later steps.

Written out, the scores of a window are a square and a few diagonals. On a GPU the square goes through flash attention,
which never stores it; the diagonals are added to its result by their share of the softmax's sum. Backwards, flash
attention recomputes each share as exp(score - logsumexp) and subtracts the row sum of output times its gradient. Given
the logsumexp and the output of square and diagonals together, its gradients are those of the joint softmax.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

Parts = tuple[Tensor, ...]


def unrolled_attention(q: Tensor, keys: list[Tensor], values: list[Tensor], scale: float) -> Tensor:
    """[B, N, L, V].

    Args:
        q: [B, N, L, D].
        keys, values: of each step so far, [B, N, L, D] and [B, N, L, V]; row p of step 0 is seen by starts from p on,
            row p of a later step by start p alone.
    """
    if q.is_cuda and q.dtype is not torch.float32:
        width = q.shape[-1] - values[0].shape[-1]  # flash attention wants values as wide as keys
        padded = [F.pad(value, (0, width)) for value in values] if width else values
        out: Tensor = FlashUnrolled.apply(scale, len(keys), q, *keys, *padded)
        return out[..., : values[0].shape[-1]]
    return plain_unrolled_attention(q, keys, values, scale)


def plain_unrolled_attention(q: Tensor, keys: list[Tensor], values: list[Tensor], scale: float) -> Tensor:
    """Compute `unrolled_attention`, written out."""
    length = q.shape[2]
    past = torch.ones(length, length, dtype=torch.bool, device=q.device).tril()
    scores = (q @ keys[0].transpose(2, 3)).float().masked_fill(~past, float("-inf"))
    own = [(q * key).sum(dim=-1, keepdim=True).float() for key in keys[1:]]
    shares = (torch.cat((scores, *own), dim=-1) * scale).softmax(dim=-1).to(q.dtype)
    out = shares[..., :length] @ values[0]
    for i, value in enumerate(values[1:]):
        out = out + shares[..., length + i, None] * value
    return out


class FlashUnrolled(torch.autograd.Function):
    """`unrolled_attention` for values as wide as keys."""

    @staticmethod
    def forward(ctx: Any, scale: float, num_steps: int, q: Tensor, *parts: Tensor) -> Tensor:
        keys, values = parts[:num_steps], parts[num_steps:]
        out, logsumexp, rest = _flash(q, keys[0], values[0], scale)
        own = [(q.float() * key.float()).sum(dim=-1) * scale for key in keys[1:]]
        if own:
            total = torch.stack((logsumexp, *own)).logsumexp(dim=0)
            mixed = out.float() * (logsumexp - total).exp()[..., None]
            for score, value in zip(own, values[1:], strict=True):
                mixed += (score - total).exp()[..., None] * value.float()
            out, logsumexp = mixed.to(q.dtype), total
        ctx.save_for_backward(q, *parts, out, logsumexp)
        ctx.scale, ctx.num_steps, ctx.rest = scale, num_steps, rest
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,) = gradients
        q, *parts, out, logsumexp = ctx.saved_tensors
        keys, values = parts[: ctx.num_steps], parts[ctx.num_steps :]
        gradient = gradient.contiguous()
        dq, dk, dv = _flash_backward(gradient, q, keys[0], values[0], out, logsumexp, ctx.scale, ctx.rest)
        wide = gradient.float()
        delta = (wide * out.float()).sum(dim=-1)
        own_dk, own_dv, dq_own = [], [], torch.zeros_like(q, dtype=torch.float32)
        for key, value in zip(keys[1:], values[1:], strict=True):
            share = ((q.float() * key.float()).sum(dim=-1) * ctx.scale - logsumexp).exp()
            d_score = (share * ((wide * value.float()).sum(dim=-1) - delta) * ctx.scale)[..., None]
            dq_own += d_score * key.float()
            own_dk.append((d_score * q.float()).to(key.dtype))
            own_dv.append((share[..., None] * wide).to(value.dtype))
        dq = (dq.float() + dq_own).to(q.dtype) if own_dk else dq
        return None, None, dq, dk, *own_dk, dv, *own_dv


def _flash(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor, Parts]:
    """Causal attention, [B, N, L] logsumexp of its scaled scores, and what its gradient needs besides."""
    if q.is_cuda:
        out, logsumexp, *rest = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True, scale=scale)
        return out, logsumexp, tuple(rest[:6])
    out, logsumexp = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True, scale=scale)
    return out, logsumexp, ()


def _flash_backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, logsumexp: Tensor, scale: float, rest: Parts
) -> Parts:
    if q.is_cuda:
        cum_q, cum_k, max_q, max_k, seed, offset = rest
        result: Parts = torch.ops.aten._scaled_dot_product_flash_attention_backward(
            gradient, q, k, v, out, logsumexp, cum_q, cum_k, max_q, max_k, 0.0, True, seed, offset, scale=scale
        )
        return result
    on_cpu: Parts = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        gradient, q, k, v, out, logsumexp, 0.0, True, scale=scale
    )
    return on_cpu
