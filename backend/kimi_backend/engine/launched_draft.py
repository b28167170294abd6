"""A draft step that is queued right behind a verify, before anybody knows what the verify accepts."""

from dataclasses import replace

from kimi_backend.engine.unread_draft import UnreadDraft
from kimi_backend.scheduler.plan_builder import Following
from kimi_backend.spec_decode.protocols import FollowingDraft
from kimi_backend.types.plan import AuxHandle, DraftReply, DrawnHandle, FollowPlan, Int32Array


class LaunchedDraft:
    """One round's. `launch` is called by the target, in the middle of its verify, or not at all."""

    def __init__(self, draft: FollowingDraft, following: Following) -> None:
        self._draft = draft
        self._following = following
        self._blocks = [sequence.blocks for sequence in following.sequences]
        self.reply: DraftReply | None = None
        """None if the draft has to be asked again, with the verify's results."""
        self.problem: Exception | None = None

    def launch(self, aux: AuxHandle, drawn: DrawnHandle) -> None:
        """Queue the step. A problem is kept: the verify that goes on around this call is not to suffer from it."""
        plan = self._following.plan
        assert isinstance(plan.follow, FollowPlan)
        try:
            self.reply = self._draft.follow(replace(plan, aux=aux, follow=replace(plan.follow, drawn=drawn)))
        except Exception as error:
            self.problem = error

    def unread(self, num_accepted_tokens: Int32Array) -> UnreadDraft:
        """What the next verify reads, once it is known what this one accepted."""
        assert self.reply is not None
        return UnreadDraft(self.reply.tokens, self._following.work(num_accepted_tokens), self._blocks)
