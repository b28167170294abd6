"""The same seed gives the same tokens, whatever the draft, k, batch, chunk size, preemptions and prefix hits.

Every case is one request under one engine setting, compared with plain decoding: whole prefixes, no KV, no engine.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import pytest

from kimi_backend.scheduler.settings import SchedulerSettings
from kimi_backend.types.request import GenerateRequest
from support.engine_checks import check_identities
from support.engine_runs import EngineHarness, Outcome, generate
from support.plain_decoding import decode_plainly
from support.random_requests import random_requests
from support.scripted_logits import LogitScript
from support.scripted_models import ScriptedDraft, ScriptedTarget, describe

VOCAB = 48
EOS = frozenset({5})
MAX_LEN = 128
NUM_REQUESTS = 200


@dataclass(frozen=True)
class Setting:
    """One way to run the same requests."""

    draft: str = "good"
    """good, random or none."""
    max_num_seqs: int = 512
    max_num_batched_tokens: int = 2048
    num_target_blocks: int = 8000
    num_draft_blocks: int = 8000
    block_size: int = 4
    k: int | None = None
    """None: each request's own."""
    prefix_cache: bool = True
    rounds: int = 1
    """The times that the requests are sent; later rounds hit the cache."""
    num_requests: int = NUM_REQUESTS

    @property
    def name(self) -> str:
        changed = {name: value for name, value in vars(self).items() if value != getattr(Setting(), name)}
        return ",".join(f"{name}={value}" for name, value in changed.items()) or "default"


PREEMPTING = Setting(
    num_target_blocks=400, num_draft_blocks=420, block_size=1, max_num_seqs=300, num_requests=200, rounds=2
)
SETTINGS = [
    Setting(),
    Setting(draft="none", block_size=16),
    Setting(k=0),
    *(Setting(k=k, draft=draft) for k, draft in zip(range(1, 8), ("good", "random") * 4, strict=False)),
    Setting(draft="random", max_num_batched_tokens=900, rounds=2),
    Setting(num_draft_blocks=7000),
    Setting(rounds=3, block_size=2, max_num_batched_tokens=900),
    PREEMPTING,
    replace(PREEMPTING, num_target_blocks=420, num_draft_blocks=400, num_requests=100, draft="random", k=7),
    replace(PREEMPTING, num_target_blocks=250, num_draft_blocks=250, num_requests=100, rounds=1, prefix_cache=False),
    Setting(max_num_batched_tokens=64, max_num_seqs=64, num_requests=80, draft="random"),
    Setting(max_num_batched_tokens=33, max_num_seqs=33, num_requests=40, num_target_blocks=100, num_draft_blocks=99),
    Setting(max_num_batched_tokens=7, max_num_seqs=7, num_requests=14, block_size=8),
]


@pytest.fixture(scope="module")
def script() -> LogitScript:
    return LogitScript(VOCAB)


@pytest.fixture(scope="module")
def requests() -> list[GenerateRequest]:
    return random_requests(random.Random(11), NUM_REQUESTS, VOCAB, longest_prompt=16, longest_output=22)


@pytest.fixture(scope="module")
def expected(script: LogitScript, requests: list[GenerateRequest]) -> list[list[int]]:
    return decode_plainly(script, requests, eos_token_ids=EOS, max_model_len=MAX_LEN)


def make_draft(kind: str, script: LogitScript, setting: Setting) -> ScriptedDraft | None:
    if kind == "none":
        return None
    description = describe(
        "draft", script, num_blocks=setting.num_draft_blocks, block_size=setting.block_size, draft_vocab_size=VOCAB - 8
    )
    columns = np.random.default_rng(3).permutation(VOCAB)[: VOCAB - 8]
    return ScriptedDraft(description, script, {"good": 0.8, "random": 0.0}[kind], columns)


@pytest.fixture(scope="module")
def run(script: LogitScript, requests: list[GenerateRequest]) -> Callable[[Setting], list[Outcome]]:
    """Runs each setting once."""
    return lru_cache(lambda setting: run_setting(script, requests, setting))


def run_setting(script: LogitScript, requests: list[GenerateRequest], setting: Setting) -> list[Outcome]:
    target = ScriptedTarget(
        describe("target", script, num_blocks=setting.num_target_blocks, block_size=setting.block_size), script
    )
    settings = SchedulerSettings(
        max_num_seqs=setting.max_num_seqs,
        max_num_batched_tokens=setting.max_num_batched_tokens,
        enable_prefix_cache=setting.prefix_cache,
    )
    harness = EngineHarness(target, make_draft(setting.draft, script, setting), settings, EOS)
    outcomes = []
    for _ in range(setting.rounds):
        outcomes += [
            harness.add(r if setting.k is None else replace(r, num_speculative_tokens=setting.k))
            for r in requests[: setting.num_requests]
        ]
        harness.run()
        harness.core.kv.check_invariants()
    return outcomes


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.name)
def test_tokens_equal_plain_decoding(
    setting: Setting, run: Callable[[Setting], list[Outcome]], expected: list[list[int]]
) -> None:
    outcomes = run(setting)
    for index, outcome in enumerate(outcomes):
        assert outcome.token_ids == expected[index % setting.num_requests], outcome.request
        check_identities(outcome)


def test_there_are_four_thousand_cases() -> None:
    assert sum(setting.rounds * setting.num_requests for setting in SETTINGS) >= 4_000


def test_the_settings_exercise_what_they_claim(run: Callable[[Setting], list[Outcome]]) -> None:
    """Preemptions, prefix hits, trimmed drafts and both finish reasons really happen in the cases above."""
    outcomes = run(PREEMPTING)
    assert sum(o.sequence.num_preemptions for o in outcomes) > 20
    assert sum(bool(o.sequence.num_cached_tokens) for o in outcomes) > 100
    assert len({o.finishes[0].reason for o in outcomes}) == 2
    ks = {drafted for o in outcomes for drafted, _ in o.rounds}
    assert ks == set(range(1, 8))


def test_a_draft_that_is_the_target_is_always_accepted(script: LogitScript) -> None:
    """Its vocabulary is permuted, so noise by column, a wrong noise index or a missing processor would show."""
    requests = [
        replace(r, sampling=replace(r.sampling, allowed_token_ids=()))
        for r in random_requests(random.Random(5), 200, VOCAB)
    ]
    columns = np.random.default_rng(1).permutation(VOCAB)
    draft = ScriptedDraft(describe("draft", script, num_blocks=4000), script, 1.0, columns)
    outcomes = generate(ScriptedTarget(describe("target", script, num_blocks=4000), script), draft, requests, None, EOS)
    rounds = [r for outcome in outcomes for r in outcome.rounds]
    assert len(rounds) > 300
    assert all(accepted == drafted for drafted, accepted in rounds)
