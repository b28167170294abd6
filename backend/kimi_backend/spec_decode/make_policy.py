"""The setting `speculation_policy` as the object that it names."""

from collections.abc import Callable

from kimi_backend.spec_decode.adaptive_policy import AdaptivePolicy
from kimi_backend.spec_decode.policy import FixedPolicy, PolicyName, SpeculationPolicy


def make_policy(name: PolicyName, clock: Callable[[], float]) -> SpeculationPolicy:
    """clock: seconds, moving forward only."""
    return AdaptivePolicy(clock) if name is PolicyName.ADAPTIVE else FixedPolicy()
