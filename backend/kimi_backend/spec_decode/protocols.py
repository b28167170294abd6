"""The two models as the engine knows them. In-process runners, BLS calls and scripted fakes implement them."""

from collections.abc import Callable
from typing import Protocol, runtime_checkable

from kimi_backend.types.plan import (
    AuxHandle,
    DraftPlan,
    DraftReply,
    DrawnHandle,
    RunnerDescription,
    TargetPlan,
    TargetReply,
)

OnQueued = Callable[[AuxHandle, DrawnHandle], None]
"""Takes what a verify will leave on the device."""


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


@runtime_checkable
class LaunchingTarget(Protocol):
    """A target that says when its step is queued, for a draft that queues its own right behind."""

    @property
    def can_launch(self) -> bool:
        """Whether it ever calls on_queued, as things stand now."""
        ...

    def verify_ahead(self, plan: TargetPlan, on_queued: OnQueued) -> TargetReply:
        """As `TargetModel.verify`. on_queued: called at most once, before the results are waited for; a step whose
        results are not worked out on the device alone does not call it. Must not raise. It may run on another thread,
        and has returned when this has."""
        ...


class PendingVerify(Protocol):
    """A step that was launched."""

    def wait(self) -> TargetReply:
        """Its reply, when it is there. Call it once; of two steps, for the first one first.

        Raises:
            ModelUnavailableError: as `TargetModel.verify`.
        """
        ...


@runtime_checkable
class QueueingTarget(Protocol):
    """A target that takes a step while the one before it is still running."""

    def launch(self, plan: TargetPlan) -> PendingVerify | None:
        """Queue a step in which every sequence brings one row. Two may be pending at once; `verify` and `verify_ahead`
        may be called when none is.

        Returns:
            None when this step cannot be left in flight, or no longer knows the step that its `drawn_rows` speak of;
            nothing was run.

        Raises:
            ModelUnavailableError: as `TargetModel.verify`.
        """
        ...


@runtime_checkable
class FollowingDraft(Protocol):
    """A draft that can follow a verify before its results are known."""

    def follow(self, plan: DraftPlan) -> DraftReply | None:
        """As `DraftModel.propose`, of a plan with a `FollowPlan`: queue the step and leave its tokens.

        Returns:
            None when this step cannot follow; nothing was run, and it is to be proposed when the results are known.
        """
        ...


def as_launching(target: object) -> LaunchingTarget | None:
    """The target, if it can say when its step is queued."""
    return target if isinstance(target, LaunchingTarget) else None


def as_queueing(target: object) -> QueueingTarget | None:
    """The target, if it takes a step while another one is running."""
    return target if isinstance(target, QueueingTarget) else None


def as_following(draft: object) -> FollowingDraft | None:
    """The draft, if it can follow a verify."""
    return draft if isinstance(draft, FollowingDraft) else None
