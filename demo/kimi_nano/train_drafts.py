"""Trains the drafts side by side on one frozen target, unrolled over several steps: forward KL to its distribution,
and towards the end also the chance that draws with the target's noise agree (`head_divergence`).

Matrices are trained with Muon (Jordan et al. 2024), a head of its own and the norms with AdamW: a draft's training is
short of steps rather than of text, and Muon needs fewer.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from kimi_backend.checkpoint.presets import DraftKind
from kimi_nano.captured import Captured
from kimi_nano.dataset import Windows
from kimi_nano.drafts import NanoDraft
from kimi_nano.features import WINDOWS_A_PASS, DraftBatch, DraftBatches, KeptBatches, LiveBatches
from kimi_nano.head_divergence import head_divergence, teacher_of
from kimi_nano.pace import Curve, Pace, set_learning_rate
from kimi_nano.recipe import Run
from kimi_nano.target import NanoTarget

Drafts = dict[DraftKind, NanoDraft]
TextByTemperature = dict[float, Windows]
"""Text that the target wrote itself, by temperature."""
COLDEST = 0.4
"""The temperature that draws are made to agree at on text of temperature 0: at 0 itself they have no gradient."""
ADAMW_SHARE = 0.15
"""AdamW's learning rate relative to Muon's, whose steps are measured otherwise."""


def make_drafts(run: Run, target: NanoTarget, token_counts: Tensor) -> Drafts:
    """Untrained drafts on the target's device.

    Args:
        token_counts: [vocab_size], how often each token occurs: a reduced head keeps the commonest.
    """
    drafts: Drafts = {}
    for kind in run.kinds:
        config = run.recipe.draft_config(kind)
        head = kept = None
        if config.draft_vocab_size < config.vocab_size:
            kept = kept_tokens(token_counts, config.draft_vocab_size).to(target.device)
            head = target.weight("lm_head.weight")[kept]
        drafts[kind] = NanoDraft(config, head, kept).to(target.device)
    return drafts


def kept_tokens(token_counts: Tensor, count: int) -> Tensor:
    """[count] int64, rising: the commonest tokens."""
    return token_counts.argsort(descending=True, stable=True)[:count].sort().values


def draft_batches(
    drafts: Drafts, target: NanoTarget, corpus: Windows, own_text: TextByTemperature, run: Run, dtype: torch.dtype
) -> DraftBatches:
    """Windows of the corpus, and of text that the target wrote itself, as many as each temperature has places."""
    recipe = run.recipe
    layers = tuple(sorted({j for draft in drafts.values() for j in draft.config.aux_layer_ids}))
    num_windows = recipe.draft_batch_tokens // recipe.draft_window
    is_kept = target.device.type == "cpu"
    fresh = WINDOWS_A_PASS if is_kept else num_windows
    own = [recipe.own_temperature(i) for i in range(int(fresh * recipe.generated_share))] if own_text else []
    counts = {temperature: own.count(temperature) for temperature in own_text}
    sources = [(corpus, fresh - len(own)), *((own_text[temperature], count) for temperature, count in counts.items())]
    temperatures = [1.0] * (fresh - len(own)) + [t for t, count in counts.items() for _ in range(count)]
    sharpness = torch.tensor([1 / max(t, COLDEST) for t in temperatures], device=target.device)
    live = LiveBatches(target, sources, sharpness, recipe.draft_window, layers, dtype)
    return KeptBatches(live, num_windows, run.seed) if is_kept else live


def train_drafts(
    drafts: Drafts, target: NanoTarget, batches: DraftBatches, run: Run, dtype: torch.dtype, *, captures: bool = False
) -> dict[str, Curve]:
    """Train in place; the target's weights stay.

    Args:
        captures: replay forward and backward passes as a CUDA graph; `batches` must be live.
    """
    recipe, pace = run.recipe, Pace(run.drafts)
    target.requires_grad_(False)
    optimizers = {kind: _optimizers(draft) for kind, draft in drafts.items()}
    curves = {kind: Curve(f"draft {kind.value}") for kind in drafts}
    coupled_share = torch.zeros((), device=target.device)
    next_losses = _gradients(drafts, target, batches, run, coupled_share, dtype, captures)
    pending: Tensor | None = None
    while pace.progress < 1.0:
        rate = pace.learning_rate(recipe.draft_peak_lr, recipe.draft_warmup_steps)
        if pace.progress >= recipe.coupled_from:
            coupled_share.fill_(recipe.coupled_share)
        losses = next_losses()
        for kind, draft in drafts.items():
            _update(draft, optimizers[kind], rate)
        if pending is not None:  # reading the losses of the step before keeps the device busy
            for curve, values in zip(curves.values(), pending.tolist(), strict=True):
                curve.add(pace, **{f"loss_{i + 1}": value for i, value in enumerate(values)})
        pending = losses
        pace.step += 1
        if pace.step == 1:
            pace.restart_clock()  # the first step compiled
    return {kind.value: curve for kind, curve in curves.items()}


def _gradients(
    drafts: Drafts,
    target: NanoTarget,
    batches: DraftBatches,
    run: Run,
    coupled_share: Tensor,
    dtype: torch.dtype,
    captures: bool,
) -> Callable[[], Tensor]:
    """A function that leaves the gradients of a new batch in the drafts and returns their losses [drafts, unroll]."""
    unroll, decay = run.recipe.unroll, run.recipe.unroll_decay

    def of_batch(batch: DraftBatch) -> Tensor:
        values = []
        for draft in drafts.values():
            draft.zero_grad(set_to_none=True)
            losses = torch.stack(unrolled_losses(draft, target, batch, unroll, coupled_share, dtype))
            (losses * decay ** torch.arange(unroll, device=losses.device)).sum().backward()
            values.append(losses.detach())
        return torch.stack(values)

    if not captures:
        return lambda: of_batch(batches.next())
    assert isinstance(batches, LiveBatches)
    live = batches
    captured = Captured(lambda tokens: of_batch(live.run(tokens)))
    return lambda: captured(live.tokens())


def unrolled_losses(
    draft: NanoDraft, target: NanoTarget, batch: DraftBatch, unroll: int, coupled_share: Tensor, dtype: torch.dtype
) -> list[Tensor]:
    """`head_divergence` of each step, mean over starts."""
    aux = torch.cat([batch.aux[j] for j in draft.config.aux_layer_ids], dim=-1)
    starts = aux.shape[1] - 1 - unroll  # every step of every start has a token to read and one to predict
    head = target.weight("lm_head.weight")
    teacher_head = head if draft.kept_tokens is None else head[draft.kept_tokens]
    sharpness = batch.sharpness[:, None].expand(-1, batch.normed.shape[1] - 1)
    teacher = teacher_of(batch.normed[:, 1:], teacher_head, sharpness, dtype)
    unrolling = draft.start(starts)
    hidden = draft.combine_aux(aux[:, :starts], dtype)
    losses = []
    for j in range(unroll):
        step = unrolling.step(batch.embedded[:, 1 + j : 1 + j + starts], hidden, dtype)
        rows = teacher.rows(j, starts)
        losses.append(head_divergence(step.normed.flatten(0, 1), draft.head(head), rows, coupled_share, dtype))
        hidden = step.hidden
    return losses


def _optimizers(draft: NanoDraft) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
    """Muon for the matrices inside, AdamW for norms and a head; learning rates are set before each step."""
    parameters = list(draft.weights.items())
    matrices = [p for name, p in parameters if p.ndim == 2 and not name.startswith("lm_head")]
    others = [p for name, p in parameters if p.ndim != 2 or name.startswith("lm_head")]
    muon = torch.optim.Muon(matrices, lr=1.0, weight_decay=0.01, momentum=0.95)
    return muon, torch.optim.AdamW(others, lr=1.0, betas=(0.9, 0.95), weight_decay=0.0)


def _update(draft: NanoDraft, optimizers: tuple[torch.optim.Optimizer, ...], rate: float) -> None:
    torch.nn.utils.clip_grad_norm_(draft.parameters(), 1.0)
    for share, optimizer in zip((1.0, ADAMW_SHARE), optimizers, strict=True):
        set_learning_rate(optimizer, rate * share)
        optimizer.step()
