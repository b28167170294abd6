"""KL(target || draft) through a vocabulary head, with the gradient written out.

The gradient of KL(p || softmax(l)) in the logits l is softmax(l) - p, so the forward pass can finish it and keep only
what is as small as the hidden states: no [rows, vocabulary] tensor waits for the backward pass.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor


class HeadDivergence(torch.autograd.Function):
    """`head_divergence` as an operation that autograd knows."""

    @staticmethod
    def forward(ctx: Any, normed: Tensor, head: Tensor, teacher: Tensor, entropy: Tensor, dtype: torch.dtype) -> Tensor:
        rows, weight = normed.detach().to(dtype), head.detach().to(dtype)
        function = _compiled(_divergence) if normed.is_cuda else _divergence
        divergence, gradient = function(rows @ weight.T, teacher, entropy)
        head_gradient = (gradient.T @ rows).to(head.dtype) if ctx.needs_input_grad[1] else None
        ctx.save_for_backward((gradient @ weight).to(normed.dtype), head_gradient)
        return divergence.mean()

    @staticmethod
    def backward(ctx: Any, *outputs: Any) -> Any:
        (output,) = outputs
        gradient, head_gradient = ctx.saved_tensors
        return output * gradient, None if head_gradient is None else output * head_gradient, None, None, None


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function)


def _divergence(logits: Tensor, teacher: Tensor, entropy: Tensor) -> tuple[Tensor, Tensor]:
    """[R] float32, each row's divergence, and the gradient of their mean in the logits [R, V]."""
    wide, p = logits.float(), teacher.float()
    log_q = wide.log_softmax(dim=-1)
    divergence = -(p * log_q).sum(dim=-1) - entropy
    return divergence, ((log_q.exp() - p) / len(logits)).to(logits.dtype)


def head_divergence(normed: Tensor, head: Tensor, teacher: Tensor, entropy: Tensor, dtype: torch.dtype) -> Tensor:
    """Mean over rows of KL(teacher || softmax(normed @ head.T)), in nats.

    Args:
        normed: [R, H] float32. head: [V, H] float32.
        teacher: [R, V], probabilities. entropy: [R] float32, theirs.
        dtype: that products are computed in.
    """
    result: Tensor = HeadDivergence.apply(normed, head, teacher, entropy, dtype)
    return result


@torch.no_grad()
def teacher_probabilities(normed: Tensor, head: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """[..., V] in `dtype`, the target's distribution over the rows of `head`, and its entropy [...] float32."""
    logits = normed.to(dtype) @ head.to(dtype).T
    result: tuple[Tensor, Tensor] = (_compiled(_distribution) if normed.is_cuda else _distribution)(logits)
    return result


def _distribution(logits: Tensor) -> tuple[Tensor, Tensor]:
    log_p = logits.float().log_softmax(dim=-1)
    p = log_p.exp()
    return p.to(logits.dtype), -(p * log_p).sum(dim=-1)
