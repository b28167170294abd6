"""An engine that has served more holds no more when nobody runs."""

import random

import pytest

from kimi_backend.scheduler.settings import SchedulerSettings
from kimi_backend.spec_decode.policy import PolicyName
from kimi_backend.types.proposer import Proposer
from support.engine_runs import EngineHarness
from support.random_requests import random_requests
from support.reachable import num_entries
from support.scripted_logits import LogitScript
from support.scripted_models import ScriptedDraft, ScriptedTarget, describe

VOCAB = 32
SCRIPT = LogitScript(VOCAB)
SIZES = {"block_size": 2, "max_model_len": 96, "num_blocks": 1600}


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("proposer", list(Proposer))
@pytest.mark.parametrize("policy", PolicyName)
def test_the_same_requests_again_leave_nothing_more(
    policy: PolicyName, proposer: Proposer, async_scheduling: bool
) -> None:
    settings = SchedulerSettings(
        max_num_seqs=20, speculation_policy=policy, proposer=proposer, async_scheduling=async_scheduling
    )
    target = ScriptedTarget(describe("target", SCRIPT, **SIZES), SCRIPT)
    draft = ScriptedDraft(describe("draft", SCRIPT, **SIZES), SCRIPT)
    harness = EngineHarness(target, draft, settings, {5})
    requests = random_requests(random.Random(3), 16, VOCAB, longest_prompt=12, longest_output=30)
    held = []
    for _ in range(3):
        for request in requests:
            harness.add(request)
        harness.run()
        # A policy that goes by the time makes other blocks of the draft each time; their number is bounded.
        held.append(num_entries([harness.core, harness.lookup_memory], but_for=(harness.core.kv,)))
    assert sum(len(outcome.steps) for outcome in harness.outcomes) > 200
    assert held[-1] <= held[1] + 20, held
