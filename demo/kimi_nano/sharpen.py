"""Scales a trained draft's logits so that draws coupled to the target's noise agree most often.

The divergence is least where the draft is as unsure as it must be; coupled draws agree more often if it is a little
surer. The scale goes into the final norm, so it costs nothing at serving. A draft without `norm_output` keeps its
greedy tokens; one with it reads a longer state in later steps, which the choice of the scale measures along with the
rest. It is chosen on text that the target writes after prompts of its training text, never on held-out prompts.
"""

from collections.abc import Sequence
from pathlib import Path

import torch

from kimi_backend.checkpoint.presets import DraftKind
from kimi_nano.acceptance import measure, record
from kimi_nano.drafts import NanoDraft
from kimi_nano.export import read_draft, write_draft
from kimi_nano.generate import generate
from kimi_nano.recipe import Recipe
from kimi_nano.target import NanoTarget

SCALES = (1.0, 1.06, 1.12, 1.18, 1.24, 1.3)
NUM_DRAFT_TOKENS = 3
FIRST_SEED = 1000


def sharpen_file(
    folder: Path, kind: DraftKind, recipe: Recipe, target: NanoTarget, prompts: Sequence[Sequence[int]]
) -> dict[float, float]:
    """`sharpen` the draft in `folder` in place; new text is a sixteenth of the context, 128 tokens of kimi-nano."""
    draft = read_draft(folder, target.config).to(target.device)
    lengths = sharpen(draft, target, prompts, recipe.context // 16)
    write_draft(folder, draft, kind, recipe)
    return lengths


@torch.no_grad()
def sharpen(
    draft: NanoDraft, target: NanoTarget, prompts: Sequence[Sequence[int]], num_tokens: int
) -> dict[float, float]:
    """Scale the draft's final norm in place by the best of `SCALES`. Returns the acceptance length of each."""
    count, device = len(prompts), target.device
    seeds = torch.arange(count, device=device) + FIRST_SEED
    written = generate(target, prompts, num_tokens, torch.ones(count, device=device), seeds, torch.float32)
    texts = record(target, prompts, written, 1.0, seeds, draft.config.aux_layer_ids)
    norm = draft.weight("norm.weight")
    trained, lengths = norm.clone(), dict[float, float]()
    for scale in SCALES:
        norm.copy_(trained * scale)
        lengths[scale] = measure(target, draft, texts, NUM_DRAFT_TOKENS, ("coupled",))["coupled"].length
    norm.copy_(trained * max(lengths, key=lengths.__getitem__))
    return lengths
