"""Windows that a draft trains on: each knows the temperature that its text was written at."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from kimi_backend.checkpoint.presets import DraftKind
from kimi_nano.dataset import Windows
from kimi_nano.recipe import MICRO, Budget, Run
from kimi_nano.target import NanoTarget
from kimi_nano.train_drafts import COLDEST, draft_batches, make_drafts

RUN = Run(recipe=MICRO, target=Budget(), drafts=Budget(), kinds=(DraftKind.MLA,))
TOKEN_OF = {0.0: 1, 1.0: 2, 0.6: 3}
CORPUS_TOKEN = 4


def windows_of(token: int) -> Windows:
    return Windows(np.full(200, token, np.uint16), torch.device("cpu"), 0)


@pytest.mark.parametrize("writes", [True, False])
def test_every_window_is_weighed_at_the_temperature_of_its_text(writes: bool) -> None:
    target = NanoTarget(MICRO.target_config())
    run = RUN if writes else replace(RUN, recipe=replace(MICRO, generated_sequences=0))
    own_text = {t: windows_of(token) for t, token in TOKEN_OF.items()} if writes else {}
    drafts = make_drafts(run, target, torch.zeros(target.config.vocab_size))
    batches = draft_batches(drafts, target, windows_of(CORPUS_TOKEN), own_text, run, torch.float32)
    batch = batches.next()
    table = target.weight("model.embed_tokens.weight")
    sharpness_of = {token: 1 / max(t, COLDEST) for t, token in TOKEN_OF.items()} | {CORPUS_TOKEN: 1.0}
    seen = set()
    for embedded, sharpness in zip(batch.embedded[:, 0], batch.sharpness, strict=True):
        token = int((table[:5].bfloat16().float() - embedded).abs().sum(dim=1).argmin())
        seen.add(token)
        assert float(sharpness) == pytest.approx(sharpness_of[token])
    assert seen == (set(sharpness_of) if writes else {CORPUS_TOKEN})
