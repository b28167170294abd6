"""Which of its own tokens the target is punished for, and that the punishment works."""

import numpy as np
import torch

from kimi_nano.dataset import Windows
from kimi_nano.export import bake
from kimi_nano.generate import generate
from kimi_nano.recipe import MICRO
from kimi_nano.target import NanoTarget
from kimi_nano.text_measures import distinct_4gram_share
from kimi_nano.unloop import OwnText, repeated_tokens, unlikelihood


def test_a_token_repeats_when_it_completes_an_earlier_4gram_of_its_row() -> None:
    written = torch.tensor([[1, 2, 3, 4, 9, 1, 2, 3, 4, 5], [5, 5, 5, 5, 5, 5, 1, 2, 3, 4]])
    assert [row.nonzero().flatten().tolist() for row in repeated_tokens(written, 4)] == [[8], [4, 5]]


def test_repeated_tokens_are_what_the_measure_counts() -> None:
    written = torch.randint(0, 3, (5, 60), generator=torch.Generator().manual_seed(0))
    for row, repeats in zip(written.tolist(), repeated_tokens(written, 4), strict=True):
        assert distinct_4gram_share(row) == 1 - int(repeats.sum()) / (len(row) - 3)


def test_the_punishment_is_the_chance_of_the_repeats() -> None:
    torch.manual_seed(0)
    target = NanoTarget(MICRO.target_config())
    tokens = torch.randint(0, 500, (2, 12))
    punished = torch.zeros(2, 12, dtype=torch.bool)
    punished[0, 7] = punished[1, 11] = True

    def chances() -> torch.Tensor:
        logits = target.logits(target(tokens, torch.float32).normed, torch.float32).view(2, 12, -1)
        p = logits.softmax(dim=-1)
        return torch.stack((p[0, 6, tokens[0, 7]], p[1, 10, tokens[1, 11]]))

    before = chances()
    loss = unlikelihood(target, tokens, punished, torch.float32)
    torch.testing.assert_close(loss, -torch.log(1 - before).sum() / 2)
    loss.backward()
    with torch.no_grad():
        for parameter in target.parameters():
            if parameter.grad is not None:
                parameter -= 0.01 * parameter.grad
    assert (chances() < before).all()


def test_a_sure_repeat_is_still_punished() -> None:
    torch.manual_seed(0)
    target = NanoTarget(MICRO.target_config())
    with torch.no_grad():  # the token itself is what the residual stream predicts
        target.weight("model.embed_tokens.weight").mul_(50)
        target.weight("lm_head.weight").copy_(target.weight("model.embed_tokens.weight"))
    tokens = torch.full((1, 6), 3)
    loss = unlikelihood(target, tokens, tokens == 3, torch.float32)
    loss.backward()
    gradient = target.weight("lm_head.weight").grad
    assert loss > 10 and gradient is not None and gradient.abs().max() > 0.01


def test_own_text_follows_prompts_of_many_lengths() -> None:
    torch.manual_seed(0)
    target, recipe, device = NanoTarget(MICRO.target_config()), MICRO.unloop, torch.device("cpu")
    stream = np.random.default_rng(0).integers(1, 500, 4000).astype(np.uint16)  # 0 pads
    line_ends = torch.arange(target.config.vocab_size) % 3 == 0
    text = OwnText(target, Windows(stream, device, 0), line_ends, recipe, torch.float32).write()

    assert text.tokens.shape == (recipe.own_sequences, recipe.window)
    bake(target)
    lengths = set()
    for tokens, repeats in zip(text.tokens, text.repeats, strict=True):
        # What was written may hold token 0: the prompt is found by trying.
        total = int(tokens.nonzero().max()) + 1
        candidates = range(max(recipe.shortest_prompt, total - recipe.own_tokens), total)
        length = next(n for n in candidates if line_ends[tokens[n - 1]] and _writes(target, tokens, n))
        written = tokens[length : length + recipe.own_tokens]
        assert torch.equal(repeats[length : length + recipe.own_tokens], repeated_tokens(written[None], recipe.gram)[0])
        assert not repeats[:length].any() and not repeats[length + recipe.own_tokens :].any()
        lengths.add(length)
    assert len(lengths) > recipe.own_sequences // 2


def _writes(target: NanoTarget, tokens: torch.Tensor, length: int) -> bool:
    own = MICRO.unloop.own_tokens
    if length + own > len(tokens):
        return False
    zero = torch.zeros(1)
    written = generate(target, [tokens[:length].tolist()], own, zero, zero.long(), torch.float32)[0]
    return torch.equal(written, tokens[length : length + own])
