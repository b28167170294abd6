"""The acceptance of a draft along the target's own text, without running the server.

Under each rule measured here the emitted tokens are the target's, whatever the draft says. So the target writes first;
then all starts of a draft are unrolled side by side (`drafts.Unrolling`), and walking from round to round reads off
what each round would have accepted. The numbers are those of serving, up to floating-point ties.

| rule at temperature > 0 | a draft token is accepted when |
|---|---|
| coupled | the draft's draw with the target's noise is the target's draw |
| greedy | the draft's most likely token is the target's draw |
| classic | always with probability min(1, q(x) / p(x)), given that the target emits x |

The last line is rejection sampling (Leviathan et al. 2023) seen from the emitted token: it proposes x with q(x),
accepts with min(1, p(x) / q(x)), so emits x by acceptance with probability min(p(x), q(x)), of p(x) in all.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kimi_nano.dataset import pad
from kimi_nano.drafts import NanoDraft
from kimi_nano.generate import token_noise
from kimi_nano.target import NanoTarget

RULES = ("coupled", "greedy", "classic")


@dataclass(frozen=True, slots=True)
class Trajectories:
    """Texts that the target wrote, and what it computed on the way."""

    tokens: Tensor
    """[B, S] int64: prompt, then what follows it, then padding."""
    prompt_lengths: Tensor
    """[B] int64."""
    num_generated: int
    temperature: float
    seeds: Tensor
    """[B] int64."""
    aux: dict[int, Tensor]
    """R(j) -> [B, S, H]."""
    normed: Tensor
    """[B, S, H], for the target's head."""


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Counts of one draft under one rule, prompt by prompt."""

    reached: Tensor
    """[B, k + 1]: rounds in which at least j draft tokens were accepted; column 0 counts all rounds."""

    @property
    def length(self) -> float:
        """1 + mean number of draft tokens accepted a round."""
        total = self.reached.sum(dim=0)
        return float(1 + total[1:].sum() / total[0])

    @property
    def lengths(self) -> Tensor:
        """[B] float64: the same for each prompt."""
        return 1 + self.reached[:, 1:].sum(dim=1) / self.reached[:, 0]

    @property
    def standard_error(self) -> float:
        """The standard error of the mean over prompts."""
        return standard_error(self.lengths)

    def of(self, prompts: Tensor) -> "Acceptance":
        """Take some prompts only, [B] bool."""
        return Acceptance(self.reached[prompts])

    @property
    def per_position(self) -> list[float]:
        """Share of rounds that accept at least 1, 2, … draft tokens."""
        total = self.reached.sum(dim=0)
        return [float(x) for x in total[1:] / total[0]]


def standard_error(values: Tensor) -> float:
    return float(values.double().std() / len(values) ** 0.5)


def drop_in_errors(right: Acceptance, wrong: Acceptance) -> float:
    """The standard errors over prompts (paired) by which `wrong` accepts less than `right`."""
    difference = (right.lengths - wrong.lengths).double()
    return float(difference.mean() / max(standard_error(difference), 1e-12))


@torch.no_grad()
def record(
    target: NanoTarget,
    prompts: Sequence[Sequence[int]],
    generated: Tensor,
    temperature: float,
    seeds: Tensor,
    aux_layer_ids: Sequence[int],
    batch_size: int = 25,
) -> Trajectories:
    """Run the target over prompts and what it wrote after them, float32."""
    texts = [[*prompt, *written] for prompt, written in zip(prompts, generated.tolist(), strict=True)]
    tokens, _ = pad(texts, generated.device)
    aux: dict[int, list[Tensor]] = {j: [] for j in aux_layer_ids}
    normed = []
    for batch in tokens.split(batch_size):
        out = target.eager(batch, torch.float32, tuple(aux_layer_ids))
        assert out.aux is not None
        for j, part in zip(aux_layer_ids, out.aux.view(*batch.shape, -1).chunk(len(aux), dim=-1), strict=True):
            aux[j].append(part)
        normed.append(out.normed.view(*batch.shape, -1))
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=generated.device)
    parts = {j: torch.cat(chunks) for j, chunks in aux.items()}
    return Trajectories(tokens, lengths, generated.shape[1], temperature, seeds, parts, torch.cat(normed))


@torch.no_grad()
def measure(
    target: NanoTarget,
    draft: NanoDraft,
    texts: Trajectories,
    num_draft_tokens: int,
    rules: Sequence[str] = RULES,
    *,
    aux_layer_ids: tuple[int, ...] | None = None,
    batch_size: int = 10,
) -> dict[str, Acceptance]:
    """Acceptance of one draft by rule; at temperature 0 all rules are the same, ask for "greedy".

    Args:
        aux_layer_ids: R(j) fed to the draft in place of its config's.
    """
    ids = aux_layer_ids or draft.config.aux_layer_ids
    reached: dict[str, list[Tensor]] = {rule: [] for rule in rules}
    for start in range(0, len(texts.tokens), batch_size):
        rows = slice(start, start + batch_size)
        aux = torch.cat([texts.aux[j][rows] for j in ids], dim=-1)
        steps = _accept_chances(target, draft, texts, rows, aux, num_draft_tokens, rules)
        for rule in rules:
            reached[rule].append(_walk(steps[rule], texts, rows))
    return {rule: Acceptance(torch.cat(parts)) for rule, parts in reached.items()}


def _accept_chances(
    target: NanoTarget,
    draft: NanoDraft,
    texts: Trajectories,
    rows: slice,
    aux: Tensor,
    num_draft_tokens: int,
    rules: Sequence[str],
) -> dict[str, Tensor]:
    """The chance by rule, [B, G, k], that token j of a round is accepted, if those before it are; a round that starts
    at generated token g has read it and proposes g + 1, g + 2, …"""
    tokens, lengths, count = texts.tokens[rows], texts.prompt_lengths[rows], texts.num_generated
    starts = tokens.shape[1] - 1
    embedded = target.weight("model.embed_tokens.weight")[tokens]
    embedded = torch.cat((embedded, embedded.new_zeros(len(tokens), num_draft_tokens, embedded.shape[2])), dim=1)
    head, unrolling = target.weight("lm_head.weight"), draft.start(starts)
    hidden = draft.combine_aux(aux[:, :starts], torch.float32)
    # Row p = prompt length - 1 + g has read generated token g; only those rows start rounds.
    row = lengths[:, None] - 1 + torch.arange(count, device=tokens.device)
    take = torch.arange(len(tokens), device=tokens.device)[:, None]
    chances: dict[str, list[Tensor]] = {rule: [] for rule in rules}
    for j in range(num_draft_tokens):
        step = unrolling.step(embedded[:, 1 + j : 1 + j + starts], hidden, torch.float32)
        hidden = step.hidden
        logits = step.normed[take, row] @ draft.head(head).T
        emitted_at = (row + 2 + j).clamp(max=tokens.shape[1] - 1)
        emitted = tokens[take, emitted_at]
        target_normed = texts.normed[rows][take, (row + 1 + j).clamp(max=tokens.shape[1] - 1)]
        for rule in rules:
            chances[rule].append(_chance(rule, draft, logits, target_normed @ head.T, emitted, emitted_at, texts, rows))
    return {rule: torch.stack(parts, dim=2) for rule, parts in chances.items()}


def _chance(
    rule: str,
    draft: NanoDraft,
    logits: Tensor,
    target_logits: Tensor,
    emitted: Tensor,
    emitted_at: Tensor,
    texts: Trajectories,
    rows: slice,
) -> Tensor:
    """[B, G] float32."""
    kept = draft.kept_tokens
    if rule == "greedy":
        best = logits.argmax(dim=-1)
        return ((best if kept is None else kept[best]) == emitted).float()
    scaled = logits / texts.temperature
    if rule == "coupled":
        seeds = texts.seeds[rows, None].expand_as(emitted).flatten()
        noise = token_noise(seeds, emitted_at.flatten(), target_logits.shape[-1]).view_as(target_logits)
        noise = noise if kept is None else noise[..., kept]
        best = (scaled.double() + noise.double()).argmax(dim=-1)
        return ((best if kept is None else kept[best]) == emitted).float()
    log_p = (target_logits / texts.temperature).log_softmax(dim=-1)
    log_q = scaled.log_softmax(dim=-1)
    if kept is not None:
        log_q = torch.full_like(log_p, float("-inf")).index_copy(-1, kept, log_q)
    gathered = [x.gather(-1, emitted[..., None])[..., 0] for x in (log_p, log_q)]
    return (gathered[1] - gathered[0]).exp().clamp(max=1.0)


def _walk(chances: Tensor, texts: Trajectories, rows: slice) -> Tensor:
    """[B, k + 1]: rounds from the first generated token on, each where the one before it ended; only rounds whose
    whole window was generated count."""
    generator = torch.Generator().manual_seed(0)
    batch, count, width = chances.shape
    coins = torch.rand(batch, count, width, generator=generator)
    accepted = (coins < chances.cpu()).int().cumprod(dim=2).sum(dim=2)
    reached = torch.zeros(batch, width + 1, dtype=torch.float64)
    for row in range(batch):
        place = 0
        while place + 1 + width <= count:
            number = int(accepted[row, place])
            reached[row, : number + 1] += 1
            place += number + 1
    return reached
