"""The start that knows the draft's own token, against a random one."""

import pytest
import torch

from kimi_backend.checkpoint.presets import DraftKind
from kimi_nano.aligned_start import align
from kimi_nano.drafts import NanoDraft
from kimi_nano.features import run_target
from kimi_nano.recipe import MICRO
from kimi_nano.target import NanoTarget
from kimi_nano.train_drafts import unrolled_losses


@pytest.mark.parametrize("kind", [DraftKind.MLA, DraftKind.MLA31])
def test_it_starts_nearer_to_the_target(kind: DraftKind) -> None:
    torch.manual_seed(0)
    target = NanoTarget(MICRO.target_config()).requires_grad_(False)
    target.weight("lm_head.weight").mul_(3)  # so that there is something to predict
    tokens = torch.randint(0, 500, (24, 64))
    draft = NanoDraft(MICRO.draft_config(kind)).requires_grad_(False)
    batch = run_target(target, tokens[:4], torch.ones(4), draft.config.aux_layer_ids, torch.float32)
    before = unrolled_losses(draft, target, batch, 1, torch.zeros(()), torch.float32)[0]
    align(draft, target, tokens[4:], torch.float32)
    after = unrolled_losses(draft, target, batch, 1, torch.zeros(()), torch.float32)[0]
    assert after < 0.8 * before


def test_it_is_for_mla_drafts() -> None:
    head = torch.zeros(512, 64)
    draft = NanoDraft(MICRO.draft_config(DraftKind.MHA), head, torch.arange(512))
    with pytest.raises(ValueError, match="MLA draft is needed"):
        align(draft, NanoTarget(MICRO.target_config()), torch.zeros(1, 8, dtype=torch.int64), torch.float32)
