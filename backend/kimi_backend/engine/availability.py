"""Meeting the two runners, and losing them: what becomes of running sequences and of both pools."""

import logging

from kimi_backend.cache.kv_manager import KvManager
from kimi_backend.engine.handshake import Geometry, check_limits, check_pair, check_runner, check_same_model
from kimi_backend.engine.policy_maker import PolicyMaker
from kimi_backend.engine.runner_link import RunnerLink
from kimi_backend.errors import ConfigError, ModelUnavailableError
from kimi_backend.scheduler.scheduler import Scheduler

logger = logging.getLogger("kimi_backend.engine")


class Availability:
    """The presence of each runner."""

    def __init__(
        self,
        target: RunnerLink,
        draft: RunnerLink | None,
        kv: KvManager,
        scheduler: Scheduler,
        geometry: Geometry,
        policies: PolicyMaker,
    ) -> None:
        """
        Raises:
            ModelUnavailableError: a runner is gone while it times its steps.
        """
        self.target, self.draft = target, draft
        self._policies = policies
        self._kv, self._scheduler, self._geometry = kv, scheduler, geometry
        policies.measure_target()
        if draft is None or draft.is_up:
            scheduler.policy = policies.make()

    def reach_target(self) -> bool:
        """Meet the target if it is away. Returns whether it is there."""
        link = self.target
        if link.is_up:
            return True
        description = link.try_connect()
        if description is None:
            return False
        assert link.description is not None
        try:
            check_runner(description, "target")
            check_same_model(link.description, description)
        except ConfigError as error:
            link.lose(str(error))
            return False
        self._kv.reset_target(description.num_blocks)
        link.accept(description)
        return True

    def reach_draft(self) -> None:
        """Meet the draft if it is away: all that want it start again with it."""
        link = self.draft
        if link is None or link.is_up:
            return
        description = link.try_connect()
        if description is None:
            return
        assert self.target.description is not None
        try:
            check_runner(description, "draft")
            check_pair(self.target.description, description)
            check_limits(description, self._geometry.settings)
            if link.description is None:  # it comes for the first time
                self._scheduler.policy = self._policies.make()
        except (ConfigError, ModelUnavailableError) as error:
            link.lose(str(error))
            return
        for sequence in self._scheduler.running.copy():
            if sequence.wants_draft:
                self._scheduler.preempt(sequence)
        self._kv.reset_draft(description.num_blocks)
        link.accept(description)

    def lose_target(self, problem: str) -> None:
        """Its KV is gone: everybody starts again."""
        self.target.lose(problem)
        for sequence in self._scheduler.running.copy():
            self._scheduler.preempt(sequence)

    def lose_draft(self, problem: str) -> None:
        """Everybody goes on without it."""
        assert self.draft is not None
        self.draft.lose(problem)
        logger.warning("speculation is off until the draft answers again")
        for sequence in self._scheduler.running:
            if sequence.uses_draft:
                self._scheduler.drop_draft(sequence)
        self._kv.reset_draft(None)
