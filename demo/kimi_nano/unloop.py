"""Teaches the target not to loop when it writes greedily: training on its own text, against what it repeats there.

Unlikelihood on whole sequences (Welleck et al. 2020, arXiv 1908.04319, section 5.2): the target continues prompts
of the corpus greedily; a token that completes a run of tokens which its continuation already held is punished by
-log(1 - p). Ordinary cross entropy on the corpus runs beside it, so that the model stays where it is otherwise.
"""

import copy

import torch
from torch import Tensor

from kimi_nano.dataset import Windows
from kimi_nano.export import bake
from kimi_nano.generate import generate
from kimi_nano.pace import Curve, Pace, adamw, set_learning_rate
from kimi_nano.recipe import Budget, UnloopRecipe
from kimi_nano.target import NanoTarget
from kimi_nano.train_target import balance, cross_entropy


def unloop(
    target: NanoTarget,
    windows: Windows,
    line_ends: Tensor,
    budget: Budget,
    recipe: UnloopRecipe,
    dtype: torch.dtype,
) -> Curve:
    """Train in place, experts rounded in the forward pass.

    Args:
        target: with baked weights, or those of a training that rounded them.
        line_ends: [vocab_size] bool, tokens that prompts end with: loops are loops of lines.
    """
    target.requires_grad_(True)
    target.quantizes = True
    optimizer = adamw(list(target.parameters()), recipe.peak_lr)
    writer = copy.deepcopy(target).requires_grad_(False)
    text = _own_text(target, writer, windows, line_ends, recipe, dtype)
    _losses(target, windows, text, recipe, dtype)[0].backward()  # what compiles, compiles before the clock starts
    pace, curve = Pace(budget), Curve("unloop")
    while pace.progress < 1.0:
        if pace.step and pace.step % recipe.steps_a_pass == 0:
            text = _own_text(target, writer, windows, line_ends, recipe, dtype)
        rate = pace.learning_rate(recipe.peak_lr, recipe.warmup_steps)
        set_learning_rate(optimizer, rate)
        loss, punishment, loads = _losses(target, windows, text, recipe, dtype)
        optimizer.zero_grad(set_to_none=True)
        (loss + recipe.weight * punishment).backward()
        torch.nn.utils.clip_grad_norm_(target.parameters(), 1.0)
        optimizer.step()
        balance(target, loads, recipe.bias_step * min(1.0, 3 * (1 - pace.progress)))
        if pace.step % 4 == 0:
            share = text[1][:, recipe.prompt_tokens :].float().mean().item()
            curve.add(pace, loss=loss.item(), punishment=punishment.item(), repeated_share=share)
        pace.step += 1
    target.requires_grad_(False)
    return curve


def _losses(
    target: NanoTarget, windows: Windows, text: tuple[Tensor, Tensor], recipe: UnloopRecipe, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Cross entropy on the corpus, punishment a written token on some of the target's own text, load of experts."""
    batch = windows.batch(recipe.batch_tokens // recipe.window, recipe.window)
    out = target(batch, dtype)
    loss = cross_entropy(out.normed, target.weight("lm_head.weight"), labels_of(batch), dtype)
    own, repeats = text
    chosen = torch.randint(0, len(own), (recipe.batch_tokens // own.shape[1],), device=own.device)
    punishment = unlikelihood(target, own[chosen], repeats[chosen], dtype) / recipe.own_tokens
    return loss, punishment, out.loads.detach()


def labels_of(batch: Tensor) -> Tensor:
    """[B * L]: each token's successor in its window, -100 for the last."""
    return torch.nn.functional.pad(batch[:, 1:], (0, 1), value=-100).flatten()


def repeated_tokens(written: Tensor, gram: int) -> Tensor:
    """[B, G] bool: tokens that complete a run of `gram` tokens which already stood in the same row.

    Args:
        written: [B, G] int64.
    """
    grams = written.unfold(1, gram, 1)
    same = (grams[:, :, None] == grams[:, None]).all(dim=-1)
    earlier = torch.ones(same.shape[1:], dtype=torch.bool, device=same.device).tril(-1)
    repeats = torch.zeros_like(written, dtype=torch.bool)
    repeats[:, gram - 1 :] = (same & earlier).any(dim=-1)
    return repeats


def unlikelihood(target: NanoTarget, tokens: Tensor, punished: Tensor, dtype: torch.dtype) -> Tensor:
    """-log(1 - p) at the tokens punished, summed and divided by the number of rows.

    Args:
        tokens: [B, L] int64. punished: [B, L] bool.
    """
    normed = target(tokens, dtype).normed.view(*tokens.shape, -1)[:, :-1]
    at = punished[:, 1:]
    logits = target.logits(normed[at], dtype).float()
    # log(1 - p) through the other tokens' logits: sure repeats keep their gradient.
    others = logits.scatter(1, tokens[:, 1:][at][:, None], float("-inf"))
    return (logits.logsumexp(dim=1) - others.logsumexp(dim=1)).sum() / len(tokens)


def _own_text(
    target: NanoTarget,
    writer: NanoTarget,
    windows: Windows,
    line_ends: Tensor,
    recipe: UnloopRecipe,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """[B, L] prompts and their greedy continuations, and which tokens of it repeat."""
    writer.load_state_dict(target.state_dict())
    bake(writer)
    count, device = recipe.own_sequences, target.device
    prompts = windows.batch_ending(count, recipe.prompt_tokens, line_ends)
    greedy, seeds = torch.zeros(count, device=device), torch.zeros(count, dtype=torch.int64, device=device)
    written = generate(writer, prompts.tolist(), recipe.own_tokens, greedy, seeds, dtype)
    repeats = torch.cat((torch.zeros_like(prompts, dtype=torch.bool), repeated_tokens(written, recipe.gram)), dim=1)
    return torch.cat((prompts, written), dim=1), repeats
