"""The choice of an engine's speculation policy: an adaptive one needs to know what the steps of both runners cost."""

from kimi_backend.scheduler.settings import SchedulerSettings
from kimi_backend.spec_decode.adaptive_policy import AdaptivePolicy
from kimi_backend.spec_decode.policy import FixedPolicy, PolicyName, SpeculationPolicy
from kimi_backend.spec_decode.protocols import Draft, Target
from kimi_backend.types.step_costs import StepCosts


class PolicyMaker:
    """Lets the runners time their steps, one after the other: each would slow the other down."""

    def __init__(self, target: Target, draft: Draft | None, settings: SchedulerSettings) -> None:
        self._target, self._draft = target, draft
        is_adaptive = settings.speculation_policy is PolicyName.ADAPTIVE and settings.max_speculative_tokens > 0
        self._is_adaptive = is_adaptive and (draft is not None or settings.proposer.uses_lookup)
        self._target_costs: StepCosts | None = None
        self._made: SpeculationPolicy | None = None

    def measure_target(self) -> None:
        """Time the target's steps, before any sequence runs: it writes KV.

        Raises:
            ModelUnavailableError: the target is gone.
        """
        if self._is_adaptive:
            self._target_costs = self._target.measure_costs()

    def make(self) -> SpeculationPolicy:
        """The policy, while no sequence uses the draft. The same one when the draft is another process by now.

        Raises:
            ModelUnavailableError: the draft is gone.
        """
        if self._made is None and self._target_costs is not None:
            costs = None if self._draft is None else self._draft.measure_costs()
            self._made = AdaptivePolicy(self._target_costs, costs)
        self._made = self._made or FixedPolicy()
        return self._made
