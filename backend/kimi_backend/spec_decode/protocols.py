"""The two models as the engine knows them. In-process runners, BLS calls and scripted fakes implement them."""

from typing import Protocol

from kimi_backend.types.plan import DraftPlan, DraftReply, RunnerDescription, TargetPlan, TargetReply


class TargetModel(Protocol):
    """Verifies draft tokens, prefills, samples; hands aux hidden states on."""

    def describe(self) -> RunnerDescription:
        """Answer the handshake.

        Raises:
            ModelUnavailableError: the runner is not there (yet).
        """
        ...

    def verify(self, plan: TargetPlan) -> TargetReply:
        """Run one step: store KV for every row, draw the sampled rows, compare with the draft tokens in the plan.

        Raises:
            ModelUnavailableError: the runner is gone; its KV is to be taken as lost.
        """
        ...


class DraftModel(Protocol):
    """Extends its KV over verified rows and proposes draft tokens."""

    def describe(self) -> RunnerDescription:
        """Answer the handshake. Raises as `TargetModel.describe`."""
        ...

    def propose(self, plan: DraftPlan) -> DraftReply:
        """Extend over the plan's rows, then take the single-row steps that the proposals need. A plan that
        `leaves_tokens` may be answered before that is done.

        Raises:
            ModelUnavailableError: the runner is gone. Never fails a request: speculation goes off.
        """
        ...
