"""Trains the target: next-token cross entropy, load balanced by the router's bias, experts rounded to int4 at the end.

The bias moves by a fixed step towards experts with less than their share of tokens, without an auxiliary loss
(DeepSeek-V3, arXiv 2412.19437, section 2.1.2).
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from kimi_nano.dataset import Windows, pad
from kimi_nano.pace import Curve, Pace, adamw, set_learning_rate
from kimi_nano.recipe import Run
from kimi_nano.target import NanoTarget

EVALUATION_BATCH = 32


def train_target(
    target: NanoTarget, windows: Windows, run: Run, dtype: torch.dtype, held_out: Sequence[Sequence[int]]
) -> tuple[Curve, dict[str, float]]:
    """Train in place.

    Args:
        held_out: token ids of some held-out files, for the loss before and after rounding.
    Returns:
        The history, and losses in nats a token: of float experts at the moment rounding starts, of the same experts
        rounded, of rounded experts at the end, and of float ones then.
    """
    recipe = run.recipe
    optimizer = adamw(list(target.parameters()), recipe.peak_lr)
    started = time.perf_counter()
    cross_entropy = _warm_up(target, windows.batch(recipe.batch_tokens // recipe.window, recipe.window), dtype)
    seconds = run.target.seconds - (time.perf_counter() - started)
    pace, curve = Pace(replace(run.target, seconds=max(1.0, seconds))), Curve("target")
    losses: dict[str, float] = {}
    pending: Tensor | None = None
    while pace.progress < 1.0:
        if not target.quantizes and pace.progress >= 1 - recipe.quantized_share:
            losses |= _losses_both_ways(target, held_out, dtype, "at_switch")
            target.quantizes = True
        length = recipe.context if pace.progress >= 1 - recipe.long_share else recipe.window
        batch = windows.batch(recipe.batch_tokens // length, length)
        rate = pace.learning_rate(recipe.peak_lr, recipe.warmup_steps)
        set_learning_rate(optimizer, rate)
        loss, loads = _step(target, cross_entropy, optimizer, batch, dtype)
        balance(target, loads, recipe.bias_step * min(1.0, 3 * (1 - pace.progress)))
        if pending is not None:  # reading the loss of the step before keeps the device busy
            curve.add(pace, loss=pending.item(), learning_rate=rate)
        pending = loss
        pace.step += 1
    losses |= _losses_both_ways(target, held_out, dtype, "at_end")
    target.quantizes = True
    return curve, losses


def _warm_up(target: NanoTarget, batch: Tensor, dtype: torch.dtype) -> Callable[..., Tensor]:
    """Compile on one batch, and go on uncompiled if that fails. Returns the loss function to use."""
    if target.is_compiled:
        compiled: Callable[..., Tensor] = torch.compile(cross_entropy)
        try:
            _loss(target, compiled, batch, dtype)[0].backward()
            target.zero_grad(set_to_none=True)
            return compiled
        except Exception as error:  # whatever the compiler's reason, training can do without it
            print(f"not compiled: {type(error).__name__}: {str(error)[:300]}", flush=True)
            target.zero_grad(set_to_none=True)
            target.eager_layers()
    return cross_entropy


def _loss(
    target: NanoTarget, cross_entropy: Callable[..., Tensor], batch: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    out = target(batch, dtype)
    # The last token of a window has no successor in it: its label is ignored.
    labels = F.pad(batch[:, 1:], (0, 1), value=-100).flatten()
    return cross_entropy(out.normed, target.weight("lm_head.weight"), labels, dtype), out.loads


def _step(
    target: NanoTarget,
    cross_entropy: Callable[..., Tensor],
    optimizer: torch.optim.Optimizer,
    batch: Tensor,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    loss, loads = _loss(target, cross_entropy, batch, dtype)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(target.parameters(), 1.0)
    optimizer.step()
    return loss.detach(), loads.detach()


def cross_entropy(normed: Tensor, head: Tensor, labels: Tensor, dtype: torch.dtype) -> Tensor:
    logits = F.linear(normed.to(dtype), head.to(dtype)).float()
    return F.cross_entropy(logits, labels, ignore_index=-100)


@torch.no_grad()
def balance(target: NanoTarget, loads: Tensor, step: float) -> None:
    target.bias += step * torch.sign(loads.mean(dim=1, keepdim=True) - loads)


def _losses_both_ways(
    target: NanoTarget, held_out: Sequence[Sequence[int]], dtype: torch.dtype, moment: str
) -> dict[str, float]:
    before, losses = target.quantizes, {}
    for quantizes, name in ((False, "float"), (True, "int4")):
        target.quantizes = quantizes
        losses[f"{name}_{moment}"] = held_out_loss(target, held_out, dtype)
    target.quantizes = before
    return losses


@torch.no_grad()
def held_out_loss(target: NanoTarget, sequences: Sequence[Sequence[int]], dtype: torch.dtype) -> float:
    """Mean nats a token over whole sequences, each from its second token on."""
    total, count = 0.0, 0
    device = target.device
    ordered = sorted(sequences, key=len)
    for start in range(0, len(ordered), EVALUATION_BATCH):
        batch, lengths = pad(ordered[start : start + EVALUATION_BATCH], device)
        logits = target.logits(target.eager(batch, dtype).normed, dtype).float().view(*batch.shape, -1)
        place = torch.arange(batch.shape[1] - 1, device=device)
        labels = batch[:, 1:].masked_fill(place >= lengths[:, None] - 1, -100)
        total += F.cross_entropy(logits[:, :-1].flatten(0, 1), labels.flatten(), reduction="sum").item()
        count += int((lengths - 1).sum())
    return total / count
