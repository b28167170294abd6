"""The presence of a runner: its last description, and when to ask again."""

import logging
from collections.abc import Callable

from kimi_backend.errors import ModelUnavailableError
from kimi_backend.spec_decode.protocols import Draft, Target
from kimi_backend.types.plan import RunnerDescription

logger = logging.getLogger("kimi_backend.engine")

FIRST_RETRY_S = 0.25
LAST_RETRY_S = 1.0


class RunnerLink:
    """One runner's handshake. Waits twice as long after each failure in a row; a step that worked resets that."""

    def __init__(self, model: Target | Draft, role: str, clock: Callable[[], float]) -> None:
        self._model = model
        self._clock = clock
        self._delay_s = FIRST_RETRY_S
        self.role = role
        self.description: RunnerDescription | None = None
        """The last answer; kept while the runner is away."""
        self.is_up = False
        self.next_try_s = 0.0
        """Clock time before which it is not asked again."""
        self.lost_s: float | None = None
        """Clock time since when it has been gone; None while it is up or was never there."""
        self.problem = f"runner {role} is loading"
        """The reason why it is not up."""
        self._dead_process_id: int | None = None

    @property
    def epoch(self) -> int | None:
        """The epoch that its replies must repeat."""
        return self.description.runner_epoch if self.is_up and self.description is not None else None

    def try_connect(self) -> RunnerDescription | None:
        """Ask for a description unless it is too early; None when it is not there. `is_up` stays as it is."""
        if self._clock() < self.next_try_s:
            return None
        try:
            return self._model.describe()
        except ModelUnavailableError as error:
            self._wait(f"runner {self.role} is loading: {error}")
            return None

    def accept(self, description: RunnerDescription) -> None:
        """Take a checked description as the runner's present one."""
        self.description = description
        self.is_up = True
        self.lost_s = None
        self.problem = ""
        logger.info("runner=%s is up epoch=%d blocks=%d", self.role, description.runner_epoch, description.num_blocks)

    def lose(self, problem: str) -> None:
        """Note that its KV is gone, and ask again later."""
        self.is_up = False
        if self.lost_s is None:
            self.lost_s = self._clock()
        before = self.problem
        self._wait(f"runner {self.role} is gone: {problem}")
        if self.problem != before:  # said once, however often it is tried again
            logger.warning("runner=%s is gone: %s", self.role, problem)

    def report_death(self, process_id: int) -> None:
        """A process has died that this runner may have run in. From any thread."""
        self._dead_process_id = process_id

    @property
    def has_died(self) -> bool:
        """Tell whether it is up only because nobody has called it since its process died."""
        return self.is_up and self.description is not None and self.process_id == self._dead_process_id is not None

    @property
    def process_id(self) -> int | None:
        """The process that was last met; None before, or when it runs in this one."""
        return None if self.description is None else self.description.process_id

    def retry_now(self) -> None:
        """It is known to be there: do not wait before asking."""
        self.next_try_s = self._clock()

    def note_success(self) -> None:
        """A step worked: the next failure is retried soon."""
        self._delay_s = FIRST_RETRY_S

    def _wait(self, problem: str) -> None:
        self.problem = problem
        self.next_try_s = self._clock() + self._delay_s
        self._delay_s = min(2 * self._delay_s, LAST_RETRY_S)
