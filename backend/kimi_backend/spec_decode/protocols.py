"""The two models as the engine knows them. In-process runners, BLS calls and scripted fakes implement them.

pending = model.launch(plan)      # queue a step
reply = pending.wait()            # its result
"""

from typing import Protocol, TypeVar

from kimi_backend.types.plan import DraftPlan, DraftReply, RunnerDescription, TargetPlan, TargetReply
from kimi_backend.types.step_costs import StepCosts

Reply = TypeVar("Reply", covariant=True)


class Pending(Protocol[Reply]):
    """A step that was launched."""

    def wait(self) -> Reply:
        """Its reply, when it is there. Call it once, in the order in which a model's steps were launched.

        Raises:
            ModelUnavailableError: the runner is gone; its KV is to be taken as lost.
        """
        ...


class Target(Protocol):
    """Verifies draft tokens, prefills, samples; hands aux hidden states on."""

    def describe(self) -> RunnerDescription:
        """Answer the handshake.

        Raises:
            ModelUnavailableError: the runner is not there (yet).
        """
        ...

    def measure_costs(self) -> StepCosts:
        """Return its steps' times: taken by the first call, over KV that nobody uses, or known from an earlier start.

        Raises:
            ModelUnavailableError: as `describe`.
        """
        ...

    @property
    def depth(self) -> int:
        """Steps that may be in flight as things stand: 2 where a step may be launched whose last tokens only the
        token table has; 0 where every reply is to be waited for before the next launch."""
        ...

    def launch(self, plan: TargetPlan) -> Pending[TargetReply]:
        """Queue one step: store KV for every row, draw the sampled rows, compare with the draft tokens.

        Raises:
            ModelUnavailableError: as `Pending.wait`.
        """
        ...


class Draft(Protocol):
    """Extends its KV over verified rows and proposes draft tokens."""

    def describe(self) -> RunnerDescription:
        """Answer the handshake. Raises as `Target.describe`."""
        ...

    def measure_costs(self) -> StepCosts:
        """See `Target.measure_costs`."""
        ...

    @property
    def depth(self) -> int:
        """1 where draft and target read each other's half of the token table; 0 where what they hand over goes through
        the host, so that a plan must have `in_table` off and know what the verify drew."""
        ...

    def launch(self, plan: DraftPlan) -> Pending[DraftReply]:
        """Queue one step: extend over the plan's rows, then take the single-row steps that the proposals need.

        Raises:
            ModelUnavailableError: the runner is gone. Never fails a request: speculation goes off.
        """
        ...
