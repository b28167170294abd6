"""The trainer in small: drafts' steps, stages that a recipe leaves out, and a target that unlearns its own repeats.

One file, as what torch loads before an optimizer's first step takes longer than all of it.
"""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from kimi_backend.checkpoint.presets import DraftKind
from kimi_nano import train
from kimi_nano.dataset import Windows
from kimi_nano.export import bake
from kimi_nano.features import DraftBatch, run_target
from kimi_nano.generate import generate
from kimi_nano.recipe import MICRO, Budget, Run
from kimi_nano.target import NanoTarget
from kimi_nano.text_measures import distinct_4gram_share
from kimi_nano.train_drafts import make_drafts, train_drafts
from kimi_nano.unloop import OwnText, WrittenText, baked_copy, divergence_from_teacher, repeated_tokens, without_repeats

CPU = torch.device("cpu")


class SameBatch:
    """A source of one batch."""

    def __init__(self, batch: DraftBatch) -> None:
        self._batch = batch

    def next(self) -> DraftBatch:
        return self._batch


@pytest.fixture
def target() -> NanoTarget:
    torch.manual_seed(0)
    target = NanoTarget(MICRO.target_config()).requires_grad_(False)
    target.weight("lm_head.weight").mul_(3)  # so that there is something to predict
    return target


def corpus() -> Windows:
    return Windows(np.arange(2000, dtype=np.uint16) % 500, CPU, seed=0)


def test_steps_lower_every_drafts_losses_and_leave_the_target_alone(target: NanoTarget) -> None:
    recipe = replace(MICRO, unroll=1, draft_warmup_steps=1, coupled_from=2.0)  # what the losses are stays
    run = Run(recipe=recipe, target=Budget(), drafts=Budget(steps=6), kinds=(DraftKind.MLA, DraftKind.MHA))
    drafts = make_drafts(run, target, torch.arange(768))
    layers = sorted({j for draft in drafts.values() for j in draft.config.aux_layer_ids})
    batch = run_target(target, torch.randint(0, 500, (4, 24)), torch.ones(4), layers, torch.float32)
    before = [weight.clone() for weight in target.state_dict().values()]
    curves = train_drafts(drafts, target, SameBatch(batch), run, torch.float32)
    for kind in run.kinds:
        losses = [row["loss_1"] for row in curves[kind.value].rows]
        assert len(losses) == 5
        assert losses[-1] < 0.8 * losses[0], losses
    assert all(map(torch.equal, before, target.state_dict().values()))


def test_a_recipe_may_leave_sharpening_out(target: NanoTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = []

    def sharpen_file(folder: Path, kind: DraftKind, recipe: object, target: object, prompts: list[list[int]]) -> object:
        assert (len(prompts), len(prompts[0])) == (MICRO.sharpen_prompts, MICRO.context // 8)
        folders.append(folder.name)
        return {1.0: 2.5}

    monkeypatch.setattr(train, "sharpen_file", sharpen_file)
    kinds = tuple(train.DRAFT_FOLDERS)
    assert train.sharpen_all(Path(), kinds, target, corpus(), replace(MICRO, sharpen_prompts=0)) == {}
    assert train.sharpen_all(Path(), kinds, target, corpus(), MICRO) == {kind.value: {1.0: 2.5} for kind in kinds}
    assert folders == list(train.DRAFT_FOLDERS.values())


@pytest.mark.parametrize("budget", [Budget(), Budget(steps=2), Budget(seconds=3.0)])
def test_a_run_may_leave_training_against_loops_out(
    target: NanoTarget, monkeypatch: pytest.MonkeyPatch, budget: Budget
) -> None:
    def unloop(target: object, corpus: object, line_ends: torch.Tensor, given: Budget, *rest: object) -> object:
        assert 0 < int(line_ends.sum()) < len(line_ends) == MICRO.text["vocab_size"]
        return SimpleNamespace(rows=[{"steps": given.steps, "seconds": given.seconds}])

    monkeypatch.setattr(train, "unloop", unloop)
    monkeypatch.setattr(
        train, "load_tokenizer", lambda path: SimpleNamespace(token_bytes=lambda i: b"a\n"[: 1 + i % 2])
    )
    run = Run(recipe=MICRO, target=Budget(), drafts=Budget(), unloop=budget)
    rows = train._unloop(target, corpus(), run, torch.float32, Path())
    assert rows == ([] if budget == Budget() else [{"steps": budget.steps, "seconds": budget.seconds}])


def test_a_recipe_may_leave_the_targets_own_text_out(target: NanoTarget) -> None:
    run = Run(recipe=replace(MICRO, generated_sequences=0), target=Budget(), drafts=Budget(steps=1))
    assert train._own_text(target, corpus(), run, torch.float32, 0.0) == {}
    short = replace(MICRO, generated_sequences=3, generated_prompt_tokens=4, generated_tokens=5)
    written = train._own_text(target, corpus(), replace(run, recipe=short), torch.float32, 0.0)
    assert {temperature: len(text._stream) for temperature, text in written.items()} == {0.0: 18, 1.0: 9}
    greedy, zeros = written[0.0]._stream.view(2, 9).long(), torch.zeros(2)
    assert torch.equal(generate(target, greedy[:, :4].tolist(), 5, zeros, zeros.long(), torch.float32), greedy[:, 4:])


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
    windows = Windows(stream, CPU, seed)
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
