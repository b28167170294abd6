"""Teaches the target not to loop when it writes greedily: training on its own text, against what it repeats there.

Unlikelihood on whole sequences (Welleck et al. 2020, arXiv 1908.04319, section 5.2): the target continues prompts
of the corpus greedily; a token that completes a run of tokens which its continuation already held is punished by
-log(1 - p). Ordinary cross entropy on the corpus runs beside it, so that the model stays where it is otherwise.

Prompts have all lengths. With prompts of 384 tokens only, texts after 384 tokens stopped looping and others did not:
the share of distinct 4-grams became 0.75 there and stayed at 0.24 after 128 and at 0.32 after 512 tokens.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kimi_nano.dataset import Windows, pad
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
    writer = OwnText(target, windows, line_ends, recipe, dtype)
    entropy = torch.compile(cross_entropy) if target.is_compiled else cross_entropy
    text = writer.write()
    _losses(target, windows, text, recipe, dtype, entropy)[0].backward()  # compiles before the clock starts
    pace, curve = Pace(budget), Curve("unloop")
    since = 0
    while pace.progress < 1.0:
        punishes = pace.progress >= recipe.plain_share
        if punishes and since % recipe.steps_a_pass == 0:
            text = writer.write()
        since += punishes
        rate = pace.learning_rate(recipe.peak_lr, recipe.warmup_steps)
        set_learning_rate(optimizer, rate)
        loss, punishment, loads = _losses(target, windows, text if punishes else None, recipe, dtype, entropy)
        optimizer.zero_grad(set_to_none=True)
        (loss + recipe.weight * punishment).backward()
        torch.nn.utils.clip_grad_norm_(target.parameters(), 1.0)
        optimizer.step()
        balance(target, loads, recipe.bias_step * min(1.0, 3 * (1 - pace.progress)))
        if pace.step % 4 == 0:
            values = {"punishment": punishment.item(), "repeated_share": text.repeated_share} if punishes else {}
            curve.add(pace, loss=loss.item(), **values)
        pace.step += 1
    target.requires_grad_(False)
    return curve


def _losses(
    target: NanoTarget,
    windows: Windows,
    text: "WrittenText | None",
    recipe: UnloopRecipe,
    dtype: torch.dtype,
    entropy: Callable[..., Tensor],
) -> tuple[Tensor, Tensor, Tensor]:
    """Cross entropy on the corpus, punishment a written token on some of the target's own text, load of experts."""
    batch = windows.batch(recipe.batch_tokens // recipe.window, recipe.window)
    out = target(batch, dtype)
    loss = entropy(out.normed, target.weight("lm_head.weight"), labels_of(batch), dtype)
    if text is None:
        return loss, torch.zeros_like(loss), out.loads.detach()
    own, repeats = text.tokens, text.repeats
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


@dataclass(frozen=True, slots=True)
class WrittenText:
    """Prompts of the corpus and what the target wrote after them."""

    tokens: Tensor
    """[B, L] int64, padded at the right."""
    repeats: Tensor
    """[B, L] bool, written tokens that repeat."""
    repeated_share: float
    """Of the written tokens."""


class OwnText:
    """Lets a copy of the target, rounded as its file will be, continue prompts of the corpus."""

    def __init__(
        self, target: NanoTarget, windows: Windows, line_ends: Tensor, recipe: UnloopRecipe, dtype: torch.dtype
    ) -> None:
        self._target = target
        self._copy = copy.deepcopy(target).requires_grad_(False)
        self._windows = windows
        self._line_ends = line_ends
        self._recipe = recipe
        self._dtype = dtype

    def write(self) -> WrittenText:
        """New prompts of lengths drawn evenly, continued greedily by the target as it is now."""
        recipe, device = self._recipe, self._target.device
        self._copy.load_state_dict(self._target.state_dict())
        bake(self._copy)
        count, longest = recipe.own_sequences, recipe.window - recipe.own_tokens
        lengths = torch.randint(recipe.shortest_prompt, longest + 1, (count,))
        ends = self._windows.batch_ending(count, longest, self._line_ends).tolist()
        prompts = [tokens[-length:] for tokens, length in zip(ends, lengths.tolist(), strict=True)]
        greedy, seeds = torch.zeros(count, device=device), torch.zeros(count, dtype=torch.int64, device=device)
        written = generate(self._copy, prompts, recipe.own_tokens, greedy, seeds, self._dtype)
        repeated = repeated_tokens(written, recipe.gram)
        tokens = torch.zeros(count, recipe.window, dtype=torch.int64, device=device)
        padded, _ = pad(prompts, device)
        tokens[:, : padded.shape[1]] = padded
        places = lengths.to(device)[:, None] + torch.arange(recipe.own_tokens, device=device)
        tokens.scatter_(1, places, written)
        repeats = torch.zeros_like(tokens, dtype=torch.bool).scatter(1, places, repeated)
        return WrittenText(tokens, repeats, repeated.float().mean().item())
