"""The two runners together: whatever the draft, the target's text comes out."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from kimi_backend.config.draft_config import DraftOverrides
from kimi_backend.runners.target_runner import TargetRunner
from support.markov_models import markov_draft, markov_draft_config, markov_target
from support.speculative_loop import SpeculativeLoop
from support.tiny_configs import draft_config, target_config
from support.tiny_runners import OwnedDraftRunner, OwnedRunner, draft_runner, target_runner

AUX_LAYER_IDS = (1, 2, 3)
AUX = DraftOverrides(aux_layer_ids=AUX_LAYER_IDS)
TARGET = target_config(num_hidden_layers=3)
PROMPTS = [[3, 5, 7, 2, 9], [1] * 20, [4, 8], [60, 61, 62, 63, 64, 65, 66, 67, 68, 69, 70, 71, 72]]
NUM_TOKENS = 36


@pytest.fixture(scope="module")
def random_target_runner() -> OwnedRunner:
    return target_runner(TARGET, aux_layer_ids=AUX_LAYER_IDS)


@pytest.fixture(scope="module")
def markov_target_runner() -> OwnedRunner:
    return target_runner(TARGET, markov_target(TARGET), aux_layer_ids=AUX_LAYER_IDS)


PlainTexts = Callable[..., list[list[int]]]


@pytest.fixture(scope="module")
def plain_texts() -> PlainTexts:
    """The texts that a target writes without a draft; each is written once."""
    found: dict[tuple[object, ...], list[list[int]]] = {}

    def write(target: TargetRunner, num_tokens: int, **fields: Any) -> list[list[int]]:
        key = id(target), num_tokens, *sorted(fields.items())
        if key not in found:
            found[key] = SpeculativeLoop(target, None, PROMPTS, 0, **fields).run(num_tokens)
        return found[key]

    return write


def noisy_draft(head_noise: float, **fields: object) -> OwnedDraftRunner:
    config = markov_draft_config(TARGET, AUX, **fields)
    return draft_runner(config, markov_draft(config, markov_target(TARGET), head_noise))


@pytest.mark.parametrize("kind", ["mla", "mla31", "mha"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_terrible_draft_changes_nothing(
    random_target_runner: OwnedRunner, plain_texts: PlainTexts, kind: str, temperature: float
) -> None:
    target, fields = random_target_runner.runner, {"temperature": temperature, "seed": 5}
    plain = plain_texts(target, NUM_TOKENS, **fields)
    draft = draft_runner(draft_config(kind, TARGET, AUX)).runner
    loop = SpeculativeLoop(target, draft, PROMPTS, [3, 1, 7, 2], **fields)
    assert loop.run(NUM_TOKENS, chunk_size=6) == plain
    assert len({tuple(tokens) for tokens in plain}) == len(plain)
    # Sharing the target's noise makes even a random draft guess some tokens right.
    drafted = sum(len(s.accepted) * s.num_speculative_tokens for s in loop.sequences)
    assert sum(sum(s.accepted) for s in loop.sequences) < drafted / 4


@pytest.mark.parametrize("k", [1, 4, 7])
def test_a_perfect_draft_is_accepted_whole(markov_target_runner: OwnedRunner, plain_texts: PlainTexts, k: int) -> None:
    target = markov_target_runner.runner
    for fields in ({"temperature": 0.0}, {"temperature": 1.0, "seed": 3}, {"temperature": 0.7, "seed": 2**63 - 1}):
        plain = plain_texts(target, NUM_TOKENS, **fields)
        loop = SpeculativeLoop(target, noisy_draft(0.0).runner, PROMPTS, k, **fields)
        assert loop.run(NUM_TOKENS) == plain
        accepted = [a for sequence in loop.sequences for a in sequence.accepted]
        assert accepted and all(a == k for a in accepted)


@pytest.mark.parametrize("vocabulary", [96, 48])
def test_a_draft_of_middling_quality(
    markov_target_runner: OwnedRunner, plain_texts: PlainTexts, vocabulary: int
) -> None:
    """Every number of accepted tokens occurs, and the text is the same."""
    target, fields = markov_target_runner.runner, {"temperature": 0.5, "seed": 11}
    plain = plain_texts(target, 70, **fields)
    draft = noisy_draft(0.1, draft_vocab_size=vocabulary)
    loop = SpeculativeLoop(target, draft.runner, PROMPTS, 3, **fields)
    assert loop.run(70, chunk_size=7) == plain
    seen = {a for sequence in loop.sequences for a in sequence.accepted}
    assert seen >= ({0, 1, 2, 3} if vocabulary == 96 else {0, 1, 2})


def test_the_next_draft_does_not_read_what_rejected_rows_wrote(random_target_runner: OwnedRunner) -> None:
    """Slots past the valid length are poisoned between steps, in both pools."""
    target, draft = random_target_runner, draft_runner(draft_config("mla", TARGET, AUX))
    plain = SpeculativeLoop(target.runner, draft.runner, PROMPTS, 4).run(NUM_TOKENS)
    loop = SpeculativeLoop(target.runner, draft.runner, PROMPTS, 4)
    drafts = []
    while any(len(sequence.token_ids) < NUM_TOKENS for sequence in loop.sequences):
        drafts.append([sequence.draft_token_ids for sequence in loop.sequences])
        loop.step()
        for sequence in loop.sequences:
            for length, blocks, pool in (
                (sequence.target_len, sequence.target_blocks, target.pool),
                (sequence.draft_len, sequence.draft_blocks, draft.pool),
            ):
                for slot in range(length, length + 16):
                    pool.tensor[:, blocks[slot // 16], slot % 16] = float("nan")
    assert [sequence.token_ids[:NUM_TOKENS] for sequence in loop.sequences] == plain
    assert all(-1 not in tokens for step in drafts for tokens in step)


def test_runners_restarted_are_told_apart() -> None:
    first, second = (
        target_runner(TARGET, aux_layer_ids=AUX_LAYER_IDS).runner.describe(),
        target_runner(TARGET, aux_layer_ids=AUX_LAYER_IDS).runner.describe(),
    )
    assert first.runner_epoch != second.runner_epoch
    assert dataclasses.replace(first, runner_epoch=second.runner_epoch) == second
