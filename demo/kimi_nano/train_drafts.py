"""Trains the drafts side by side on one frozen target: forward KL to its distribution, unrolled over several steps."""

import torch
from torch import Tensor

from kimi_backend.checkpoint.presets import DraftKind
from kimi_nano.dataset import Windows
from kimi_nano.drafts import NanoDraft
from kimi_nano.head_divergence import head_divergence, teacher_probabilities
from kimi_nano.pace import Curve, Pace, adamw, set_learning_rate
from kimi_nano.recipe import Run
from kimi_nano.target import NanoTarget

Drafts = dict[DraftKind, NanoDraft]


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


def train_drafts(
    drafts: Drafts, target: NanoTarget, corpus: Windows, generated: Windows | None, run: Run, dtype: torch.dtype
) -> dict[str, Curve]:
    """Train in place; the target's weights stay.

    Args:
        generated: text that the target wrote; None trains on the corpus alone.
    """
    recipe, pace = run.recipe, Pace(run.drafts)
    target.requires_grad_(False)
    optimizers = {kind: adamw(list(draft.parameters()), recipe.draft_peak_lr) for kind, draft in drafts.items()}
    curves = {kind: Curve(f"draft {kind.value}") for kind in drafts}
    aux_ids = {kind: draft.config.aux_layer_ids for kind, draft in drafts.items()}
    all_ids = tuple(sorted({j for ids in aux_ids.values() for j in ids}))
    pending: dict[DraftKind, Tensor] = {}
    while pace.progress < 1.0:
        rate = pace.learning_rate(recipe.draft_peak_lr, recipe.warmup_steps)
        batch = _batch(corpus, generated, run)
        with torch.no_grad():
            out = target.eager(batch, dtype, all_ids)
            embedded = target.weight("model.embed_tokens.weight")[batch]
        assert out.aux is not None, "drafts read aux hidden states"
        chunks = dict(zip(all_ids, out.aux.view(*batch.shape, -1).chunk(len(all_ids), dim=-1), strict=True))
        for kind, draft in drafts.items():
            aux = torch.cat([chunks[j] for j in aux_ids[kind]], dim=-1)
            set_learning_rate(optimizers[kind], rate)
            losses = _unrolled_losses(draft, target, aux, embedded, out.normed.view_as(embedded), run, dtype)
            _update(draft, optimizers[kind], losses, recipe.unroll_decay)
            if kind in pending:
                values = pending[kind].tolist()
                curves[kind].add(pace, **{f"loss_{i + 1}": value for i, value in enumerate(values)})
            pending[kind] = torch.stack(losses).detach()
        pace.step += 1
    return {kind.value: curve for kind, curve in curves.items()}


def _batch(corpus: Windows, generated: Windows | None, run: Run) -> Tensor:
    """Windows of the corpus, then windows of generated text."""
    recipe = run.recipe
    num_windows, length = recipe.draft_batch_tokens // recipe.draft_window, recipe.draft_window
    num_generated = int(num_windows * recipe.generated_share) if generated is not None else 0
    batch = corpus.batch(num_windows - num_generated, length)
    if generated is None or not num_generated:
        return batch
    return torch.cat((batch, generated.batch(num_generated, length)))


def _unrolled_losses(
    draft: NanoDraft,
    target: NanoTarget,
    aux: Tensor,
    embedded: Tensor,
    target_normed: Tensor,
    run: Run,
    dtype: torch.dtype,
) -> list[Tensor]:
    """KL of each step, mean nats a start.

    Args:
        aux: [B, L, C * H] of the draft's own layers. embedded, target_normed: [B, L, H] of the window's tokens.
    """
    length = embedded.shape[1]
    starts = length - 1 - run.recipe.unroll  # every step of every start has a token to read and one to predict
    head = target.weight("lm_head.weight")
    teacher_head = head if draft.kept_tokens is None else head[draft.kept_tokens]
    teacher, entropy = teacher_probabilities(target_normed[:, 1:], teacher_head, dtype)
    unrolling = draft.start(starts)
    hidden = draft.combine_aux(aux[:, :starts], dtype)
    losses = []
    for j in range(run.recipe.unroll):
        step = unrolling.step(embedded[:, 1 + j : 1 + j + starts], hidden, dtype)
        p, h = (x[:, j : j + starts].flatten(0, 1) for x in (teacher, entropy))
        losses.append(head_divergence(step.normed.flatten(0, 1), draft.head(head), p, h, dtype))
        hidden = step.hidden
    return losses


def _update(draft: NanoDraft, optimizer: torch.optim.Optimizer, losses: list[Tensor], decay: float) -> None:
    total = sum((loss * decay**j for j, loss in enumerate(losses)), torch.zeros((), device=losses[0].device))
    optimizer.zero_grad(set_to_none=True)
    total.backward()
    torch.nn.utils.clip_grad_norm_(draft.parameters(), 1.0)
    optimizer.step()
