"""Tokens drawn under a grammar's masks have the target's distribution, renormalised over what the masks allow."""

import functools
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest

from kimi_backend.scheduler.settings import SchedulerSettings
from kimi_backend.types.grammar import Choice, Grammar
from kimi_backend.types.plan import Int32Array
from kimi_backend.types.request import GenerateRequest, SamplingParams
from support.chi_square import chi_square_p_value
from support.engine_runs import EngineHarness
from support.scripted_logits import LogitScript, prefix_hash
from support.scripted_models import ScriptedDraft, ScriptedTarget, describe

VOCAB, TEMPERATURE, PROMPT = 16, 1.2, (3, 1, 4)
SCRIPT = LogitScript(VOCAB, scales=(3.0,))
GRAMMAR = Grammar(Choice(("",)), "f")
THRESHOLD = 1e-9
Fits = Callable[[list[int], int], bool]


def fits(before: list[int], token_id: int) -> bool:
    """A grammar: which token may follow depends on those before."""
    return (token_id + sum(before)) % 3 != 0


class FollowingMatcher:
    """`Matcher` and `CompiledGrammar` of such a rule."""

    text_mask = np.full(1, -1, np.int32)

    def __init__(self, rule: Fits) -> None:
        self.rule = rule
        self.tokens: list[int] = []

    def matcher(self) -> "FollowingMatcher":
        return FollowingMatcher(self.rule)

    def fill(self, words: Int32Array) -> None:
        words[0] = sum(1 << token_id for token_id in range(VOCAB) if self.rule(self.tokens, token_id))

    def accept(self, token_id: int) -> bool:
        self.tokens.append(token_id)
        return self.rule(self.tokens[:-1], token_id)

    def rollback(self, num_tokens: int) -> None:
        del self.tokens[len(self.tokens) - num_tokens :]

    def forced(self, words: Int32Array) -> int | None:
        return None


def draw_pairs(rule: Fits, num_draws: int) -> npt.NDArray[np.int64]:
    """[num_draws, 2] first two tokens of requests that differ by their seeds only."""
    sizes = {"num_blocks": 2048}
    harness = EngineHarness(
        ScriptedTarget(describe("target", SCRIPT, **sizes), SCRIPT),
        ScriptedDraft(describe("draft", SCRIPT, **sizes), SCRIPT, agreement=0.5),
        SchedulerSettings(max_num_seqs=512, max_num_batched_tokens=2048),
        (),
        lambda grammar: FollowingMatcher(rule),
    )
    for seed in range(num_draws):
        harness.add(
            GenerateRequest(
                request_id=str(seed),
                prompt_token_ids=PROMPT,
                sampling=SamplingParams(temperature=TEMPERATURE, max_tokens=3, seed=seed, grammar=GRAMMAR),
                num_speculative_tokens=2,
            )
        )
    harness.run()
    return np.array([outcome.token_ids[:2] for outcome in harness.outcomes])


@functools.cache
def exact() -> npt.NDArray[np.float64]:
    """[VOCAB, VOCAB] the probability of each pair."""

    def following(before: list[int]) -> npt.NDArray[np.float64]:
        hashes = np.array([prefix_hash([*PROMPT, *before])], np.uint64)
        weights = np.exp(SCRIPT.logits(hashes)[0].astype(np.float64) / TEMPERATURE)
        weights[[not fits(before, token_id) for token_id in range(VOCAB)]] = 0
        return weights / weights.sum()

    first = following([])
    return np.stack([first[token_id] * following([token_id]) for token_id in range(VOCAB)])


def nearly_fits(before: list[int], token_id: int) -> bool:
    """The same, but for the likeliest second token, which it leaves out."""
    return fits(before, token_id) and (len(before) != 1 or token_id != int(exact().sum(axis=0).argmax()))


SHORT, WHOLE = 2_000, pytest.param(20_000, marks=pytest.mark.soak)


@pytest.mark.parametrize("num_draws", [SHORT, WHOLE])
def test_draws_under_a_mask(num_draws: int) -> None:
    assert chi_square_p_value(draw_pairs(fits, num_draws), exact()) > THRESHOLD


@pytest.mark.parametrize("num_draws", [SHORT, WHOLE])
def test_a_mask_that_leaves_a_token_out_is_seen(num_draws: int) -> None:
    assert chi_square_p_value(draw_pairs(nearly_fits, num_draws), exact()) < THRESHOLD
