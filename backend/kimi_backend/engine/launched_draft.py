"""A draft step that is queued right behind a verify, before anybody knows what the verify accepts."""

from collections.abc import Callable
from dataclasses import replace

from kimi_backend.cache.kv_manager import SequenceBlocks
from kimi_backend.engine.unread_draft import UnreadDraft
from kimi_backend.scheduler.plan_builder import Following
from kimi_backend.spec_decode.protocols import FollowingDraft
from kimi_backend.types.plan import AuxHandle, DraftReply, DrawnHandle, Int32Array


class LaunchedDraft:
    """One round's. `launch` is called by the target, in the middle of its verify, or not at all."""

    def __init__(self, draft: FollowingDraft, plan: Callable[[], Following | None]) -> None:
        """plan: called when the verify is on its way, which need not wait for it; see `PlanBuilder.following`."""
        self._draft = draft
        self._plan = plan
        self._following: Following | None = None
        self._blocks: list[SequenceBlocks | None] = []
        self.reply: DraftReply | None = None
        """None if the draft has to be asked again, with the verify's results."""
        self.problem: Exception | None = None

    def launch(self, aux: AuxHandle, drawn: DrawnHandle) -> None:
        """Queue the step. A problem is kept: the verify that goes on around this call is not to suffer from it."""
        try:
            self._following = following = self._plan()
            if following is None:
                return
            self._blocks = [sequence.blocks for sequence in following.sequences]
            plan, follow = following.plan, following.plan.follow
            assert follow is not None
            self.reply = self._draft.follow(replace(plan, aux=aux, follow=replace(follow, drawn=drawn)))
        except Exception as error:
            self.problem = error

    def unread(self, num_accepted_tokens: Int32Array) -> UnreadDraft:
        """What the next verify reads, once it is known what this one accepted."""
        assert self.reply is not None
        assert self._following is not None
        return UnreadDraft(self.reply.tokens, self._following.work(num_accepted_tokens), self._blocks)
