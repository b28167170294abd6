"""The target's own tokens that are taken out of what the target learns from itself, and that it does learn."""

from dataclasses import replace

import numpy as np
import torch

from kimi_nano.dataset import Windows
from kimi_nano.export import bake
from kimi_nano.generate import generate
from kimi_nano.recipe import MICRO
from kimi_nano.target import NanoTarget
from kimi_nano.text_measures import distinct_4gram_share
from kimi_nano.unloop import OwnText, WrittenText, baked_copy, divergence_from_teacher, repeated_tokens, without_repeats


def test_a_token_repeats_when_it_completes_an_earlier_4gram_of_its_row() -> None:
    written = torch.tensor([[1, 2, 3, 4, 9, 1, 2, 3, 4, 5], [5, 5, 5, 5, 5, 5, 1, 2, 3, 4]])
    assert [row.nonzero().flatten().tolist() for row in repeated_tokens(written, 4)] == [[8], [4, 5]]


def test_repeated_tokens_are_what_the_measure_counts() -> None:
    written = torch.randint(0, 3, (5, 60), generator=torch.Generator().manual_seed(0))
    for row, repeats in zip(written.tolist(), repeated_tokens(written, 4), strict=True):
        assert distinct_4gram_share(row) == 1 - int(repeats.sum()) / (len(row) - 3)


def test_the_teacher_without_repeats_keeps_the_rest_in_proportion() -> None:
    logits = torch.tensor([[1.0, 2.0, 3.0], [1.0, 2.0, 3.0]])
    probabilities = without_repeats(logits, torch.tensor([2, 2]), torch.tensor([True, False]))
    torch.testing.assert_close(probabilities[0, :2], logits[0, :2].softmax(0))
    assert probabilities[0, 2] == 0
    torch.testing.assert_close(probabilities[1], logits[1].softmax(0))


def test_a_target_differs_from_its_teacher_only_in_repeats() -> None:
    text, target = own_text(0)
    assert 0.3 < text.repeated_share < 1
    kept = replace(text, repeats=torch.zeros_like(text.repeats))
    assert abs(float(divergence_from_teacher(target, kept, torch.float32))) < 1e-6
    assert float(divergence_from_teacher(target, text, torch.float32)) > 0.01


def test_training_towards_the_teacher_takes_repeats_out() -> None:
    text, target = own_text(0)
    target.requires_grad_(True)
    optimizer = torch.optim.Adam(target.parameters(), lr=1e-3)
    before = divergence_from_teacher(target, text, torch.float32)
    for _ in range(5):
        optimizer.zero_grad()
        divergence_from_teacher(target, text, torch.float32).backward()
        optimizer.step()
    assert divergence_from_teacher(target, text, torch.float32) < 0.8 * before


LINE_ENDS = torch.arange(MICRO.target_config().vocab_size) % 3 == 0


def own_text(seed: int) -> tuple[WrittenText, NanoTarget]:
    """Text of a target that repeats its last token, and the target with the weights that wrote it."""
    torch.manual_seed(seed)
    target = NanoTarget(MICRO.target_config()).requires_grad_(False)
    target.weight("model.embed_tokens.weight").mul_(20)
    target.weight("lm_head.weight").copy_(target.weight("model.embed_tokens.weight") / 4)
    stream = np.random.default_rng(seed).integers(1, 500, 4000).astype(np.uint16)  # 0 pads
    windows = Windows(stream, torch.device("cpu"), seed)
    text = OwnText(target, baked_copy(target), windows, LINE_ENDS, MICRO.unloop, torch.float32).write()
    bake(target)
    return text, target


def test_own_text_follows_prompts_of_many_lengths() -> None:
    (text, target), recipe = own_text(0), MICRO.unloop
    assert text.tokens.shape == (recipe.own_sequences, recipe.window)
    lengths = text.places[:, 0]
    assert len(set(lengths.tolist())) > recipe.own_sequences // 2
    zero = torch.zeros(1)
    for tokens, repeats, length in zip(text.tokens, text.repeats, lengths.tolist(), strict=True):
        assert LINE_ENDS[tokens[length - 1]] and length >= recipe.shortest_prompt
        written = generate(target, [tokens[:length].tolist()], recipe.own_tokens, zero, zero.long(), torch.float32)
        assert torch.equal(written[0], tokens[length : length + recipe.own_tokens])
        assert torch.equal(repeats, repeated_tokens(written, recipe.gram)[0])
        assert not tokens[length + recipe.own_tokens :].any()
