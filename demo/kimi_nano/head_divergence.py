"""The loss of a draft: its distribution over the vocabulary against the target's, with the gradient written out.

Two losses, mixed:

- KL(p || q) of the target's p and the draft's q, whose gradient in the logits is q - p;
- the chance that coupled draws differ, at the temperature of the text. With the same Gumbel noise both draw x with
  chance 1 / sum_y max(p_y / p_x, q_y / q_x) (the noise of y must lose on either side), so, given that the target draws
  x, the draft does too with chance 1 / sum_y max(p_y, p_x q_y / q_x). One draw of each row is enough. At temperature t
  p and q are p^(1/t) and q^(1/t), normalised.

KL wants the draft as unsure as what it cannot know; agreeing draws want it surer. The forward pass finishes the
gradient and keeps only what is as small as the hidden states: no [rows, vocabulary] tensor waits for the backward pass.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Teacher:
    """The target's distribution in rows of any shape."""

    probabilities: Tensor
    """[..., V], in the dtype of products."""
    entropy: Tensor
    """[...] float32, in nats."""
    draws: Tensor
    """[...] int64, one token drawn from it at the temperature of the text."""
    sharpness: Tensor
    """[...] float32, 1 / the temperature of the text."""

    def rows(self, start: int, count: int) -> "Teacher":
        """Places `start` to `start + count` of windows [B, L, ...], flattened."""
        parts = (self.probabilities, self.entropy, self.draws, self.sharpness)
        return Teacher(*(x[:, start : start + count].flatten(0, 1) for x in parts))


class HeadDivergence(torch.autograd.Function):
    """`head_divergence` as an operation that autograd knows."""

    @staticmethod
    def forward(
        ctx: Any, normed: Tensor, head: Tensor, teacher: Teacher, coupled_share: Tensor, dtype: torch.dtype
    ) -> Tensor:
        rows, weight = normed.detach().to(dtype), head.detach().to(dtype)
        function = _compiled(_divergence) if normed.is_cuda else _divergence
        given = (teacher.probabilities, teacher.entropy, teacher.draws, teacher.sharpness)
        loss, gradient = function(rows @ weight.T, *given, coupled_share)
        head_gradient = (gradient.T @ rows).to(head.dtype) if ctx.needs_input_grad[1] else None
        ctx.save_for_backward((gradient @ weight).to(normed.dtype), head_gradient)
        return loss.mean()

    @staticmethod
    def backward(ctx: Any, *outputs: Any) -> Any:
        (output,) = outputs
        gradient, head_gradient = ctx.saved_tensors
        return output * gradient, None if head_gradient is None else output * head_gradient, None, None, None


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function)


def _divergence(
    logits: Tensor, teacher: Tensor, entropy: Tensor, draws: Tensor, sharpness: Tensor, share: Tensor
) -> tuple[Tensor, Tensor]:
    """[R] float32, each row's loss, and the gradient of their mean in the logits [R, V]."""
    wide, p, drawn = logits.float(), teacher.float(), draws[:, None]
    log_q = wide.log_softmax(dim=-1)
    divergence = -(p * log_q).sum(dim=-1) - entropy
    sharp = sharpness[:, None]
    powered = p**sharp
    p_sharp = powered / powered.sum(dim=-1, keepdim=True)
    # What each token weighs in the sum over max(p_y, p_x q_y / q_x), as the draft has it.
    weighed = p_sharp.gather(1, drawn) * (sharp * (log_q - log_q.gather(1, drawn))).clamp(max=60).exp()
    total = torch.maximum(weighed, p_sharp).sum(dim=-1, keepdim=True)
    agree = 1 / total
    pull = torch.where(weighed > p_sharp, sharp * agree * (weighed / total), 0.0)
    is_drawn = torch.arange(logits.shape[1], device=logits.device) == drawn
    apart = pull - torch.where(is_drawn, pull.sum(dim=-1, keepdim=True), 0.0)
    gradient = (1 - share) * (log_q.exp() - p) + share * apart
    return (1 - share) * divergence + share * (1 - agree[:, 0]), (gradient / len(logits)).to(logits.dtype)


def head_divergence(
    normed: Tensor, head: Tensor, teacher: Teacher, coupled_share: Tensor, dtype: torch.dtype
) -> Tensor:
    """Mean over rows of the loss of softmax(normed @ head.T).

    Args:
        normed: [R, H] float32. head: [V, H] float32.
        teacher: of R rows.
        coupled_share: [] float32 on the same device: 0 is the divergence in nats, 1 the chance that draws differ.
        dtype: that products are computed in.
    """
    result: Tensor = HeadDivergence.apply(normed, head, teacher, coupled_share, dtype)
    return result


@torch.no_grad()
def teacher_of(normed: Tensor, head: Tensor, sharpness: Tensor, dtype: torch.dtype) -> Teacher:
    """The target's distribution over the rows of `head`.

    Args:
        normed: [..., H]. sharpness: [...] float32, 1 / the temperature of the text.
    """
    logits = normed.to(dtype) @ head.to(dtype).T
    waits = torch.empty(logits.shape, dtype=torch.float32, device=logits.device).exponential_()
    function = _compiled(_distribution) if normed.is_cuda else _distribution
    probabilities, entropy, draws = function(logits, waits, sharpness)
    return Teacher(probabilities, entropy, draws, sharpness)


def _distribution(logits: Tensor, waits: Tensor, sharpness: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    log_p = logits.float().log_softmax(dim=-1)
    p = log_p.exp()
    # The first to arrive of exponential clocks with rates p^sharpness is drawn from it.
    drawn = (sharpness[..., None] * log_p - waits.log()).argmax(dim=-1)
    return p.to(logits.dtype), -(p * log_p).sum(dim=-1), drawn
