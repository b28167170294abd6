"""A stranger on the network cannot break a server that `kimi serve` starts: the attacks of `scripts/attack.py`."""

import pytest

from attack_suite.access_attacks import ACCESS_ATTACKS
from attack_suite.request_attacks import REQUEST_ATTACKS
from attack_suite.runner_attacks import RUNNER_ATTACKS, fuzz
from attack_suite.victim import Victim

NUM_PLANS = 150


@pytest.fixture(scope="module")
def victim(server, checkpoint):
    return Victim.of(server, checkpoint)


@pytest.mark.parametrize("attack", [*ACCESS_ATTACKS, *RUNNER_ATTACKS, *REQUEST_ATTACKS], ids=lambda a: a.__name__)
def test_held(victim, attack):
    before = victim.generate(text_input="the same", max_tokens=12, seed=3)
    attack(victim)
    assert victim.generate(text_input="the same", max_tokens=12, seed=3)[1]["text_output"] == before[1]["text_output"]


@pytest.mark.parametrize("seed", [0, 1])
def test_fuzzed_plans_are_run_or_refused(victim, seed):
    fuzz(victim, NUM_PLANS, seed)
    assert victim.generate(text_input="after", max_tokens=4)[0] == 200


@pytest.mark.parametrize(
    "path", ["health/ready", "models/spec_ensemble", "models/spec_ensemble/config", "models/stats"]
)
def test_what_only_reads_stays_open_on_a_loopback_address(victim, path):
    """perf_analyzer needs these."""
    assert victim.send("GET", f"/v2/{path}")[0] == 200
