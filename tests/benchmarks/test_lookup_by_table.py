"""Proposers over texts that are made up: nobody is faster than the bound, and who knows less is no faster."""

import argparse
import random
import sys
from pathlib import Path

import pytest

from kimi_backend.config.settings import ServingSettings

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
from lookup_by_table import PROPOSERS, bounds, of_the_better, serve
from lookup_suite import recorded
from lookup_suite.recorded import RecordedText
from lookup_suite.replayed import ReplayedDraft, ReplayedTarget
from replayed_policy import COSTS, Machine
from serving_suite.side_by_side import NANO

ARGS = argparse.Namespace(streams=3, max_tokens=40, min_match=4)


def some_texts(count: int) -> list[RecordedText]:
    """Texts that go on as their prompts did, with fresh tokens between, and a draft that is right in two of three."""
    rng, texts = random.Random(0), []
    for _ in range(count):
        prompt = [rng.randrange(3000) for _ in range(60)]
        tokens = [*prompt[:15], *(rng.randrange(3000) for _ in range(10)), *prompt[20:35]]
        right = [token if rng.random() < 0.67 else 3001 for token in tokens]
        proposals = {place: right[place : place + 7] for place in range(1, 40)}
        texts.append(RecordedText(prompt, [], 0.0, tokens, proposals))
    return texts


@pytest.fixture(scope="module")
def texts() -> list[RecordedText]:
    return some_texts(9)


def test_nobody_is_faster_than_the_bound_of_what_it_uses(texts: list[RecordedText]) -> None:
    machine = Machine.read(COSTS)
    rates = {proposer: serve(proposer, [texts], machine, ARGS)[0]["tokens_per_s"] for proposer in PROPOSERS}
    found = bounds(texts, machine, ARGS)
    for proposer in PROPOSERS[1:]:
        assert rates["none"] < rates[proposer] < found[proposer], proposer
    assert max(found["eagle3"], found["lookup"]) < found["lookup+eagle3"]


def test_the_same_texts_take_the_same_rounds(texts: list[RecordedText]) -> None:
    machine = Machine.read(COSTS)
    first, second = (serve("lookup+eagle3", [texts, texts], machine, ARGS) for _ in range(2))
    assert first == second
    assert len(first) == 2


def test_a_recording_has_what_the_draft_proposes_at_every_place(
    texts: list[RecordedText], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The texts, of a pair that knows them, stay what they are, though nothing that is proposed is verified."""
    machine = Machine.read(COSTS)
    pair = ReplayedTarget(texts, machine.target), ReplayedDraft(texts, machine.draft)
    monkeypatch.setattr(recorded, "load_pair", lambda settings: pair)
    empty = [RecordedText(text.prompt, [], 0.0) for text in texts]
    recorded.record(ServingSettings(checkpoint=str(NANO), draft=str(NANO / "draft")), empty, 40)
    for text, found in zip(texts, empty, strict=True):
        assert found.tokens == text.tokens
        assert found.proposals == {place: text.proposals[place][: 39 - place] for place in range(1, 39)}
    assert pair[0].num_kept == 0


def test_what_a_draft_has_right_ends_with_its_first_wrong_token() -> None:
    text = RecordedText([1], [], 0.0, [5, 6, 7, 8], {1: [6, 7, 9], 2: [7, 8], 3: []})
    assert [text.kept(place) for place in range(1, 4)] == [2, 2, 0]


def test_both_are_compared_with_the_faster_one() -> None:
    rates = {"eagle3": 80.0, "lookup": 100.0, "lookup+eagle3": 97.0}
    assert of_the_better({proposer: {"tokens_per_s": rate} for proposer, rate in rates.items()}) == 0.97
