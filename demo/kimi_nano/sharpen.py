"""Scales a trained draft's logits so that draws coupled to the target's noise agree most often.

The divergence is least where the draft is as unsure as it must be; coupled draws agree more often if it is a little
surer. The scale goes into the final norm, so it costs nothing at serving, and greedy drafts stay as they are. It is
chosen on text that the target writes after prompts of its training text, never on held-out prompts.
"""

from collections.abc import Sequence

import torch

from kimi_nano.acceptance import measure, record
from kimi_nano.drafts import NanoDraft
from kimi_nano.generate import generate
from kimi_nano.target import NanoTarget

SCALES = (1.0, 1.06, 1.12, 1.18, 1.24)
NUM_NEW_TOKENS = 128
NUM_DRAFT_TOKENS = 3
FIRST_SEED = 1000


@torch.no_grad()
def sharpen(
    draft: NanoDraft, target: NanoTarget, prompts: Sequence[Sequence[int]], num_tokens: int = NUM_NEW_TOKENS
) -> dict[float, float]:
    """Scale the draft's final norm in place by the best of `SCALES`. Returns the acceptance length of each.

    Raises:
        ValueError: the draft feeds its normed state back, so that the scale would change what later steps read.
    """
    if draft.config.norm_output:
        raise ValueError("sharpen: a draft with norm_output given, one without is needed")
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
