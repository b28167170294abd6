"""One round for all running sequences: schedule → verify → commit → emit → draft → publish.

Runs on one thread, with one step of each model in flight. A draft may be launched behind a verify before that is done,
and may answer before its own step is done; the next verify reads its tokens on the device and tells how it went. Where
nobody drafts, the next step of the target may be launched instead (docs/decisions/0016). Knows nothing of strings,
clients or threads.
"""

import logging
import time
from collections.abc import Callable, Iterable
from functools import partial

from kimi_backend.cache.kv_manager import KvManager
from kimi_backend.engine.commit import StepOutput, commit_step
from kimi_backend.engine.handshake import Geometry, check_limits, check_pair, check_runner, check_same_model
from kimi_backend.engine.held_outputs import HeldOutputs
from kimi_backend.engine.launched_draft import LaunchedDraft
from kimi_backend.engine.runner_link import RunnerLink
from kimi_backend.engine.step_times import StepTimes
from kimi_backend.engine.steps_ahead import StepsAhead, TargetStep
from kimi_backend.engine.unread_draft import UnreadDraft
from kimi_backend.errors import ConfigError, KimiError, ModelUnavailableError
from kimi_backend.scheduler.plan_builder import DraftWork, PlanBuilder, store_followed, store_proposals
from kimi_backend.scheduler.scheduler import Scheduler
from kimi_backend.scheduler.sequence import Finish, Sequence
from kimi_backend.spec_decode.protocols import DraftModel, TargetModel, as_following, as_launching, as_queueing
from kimi_backend.types.plan import STATUS_NO_TOKEN_LEFT, AuxHandle, DraftPlan, DraftReply, DrawnHandle, TargetReply
from kimi_backend.types.request import EndCause, FinishReason

logger = logging.getLogger("kimi_backend.engine")

MAX_FAILED_STEPS = 3
"""Target steps in a row that may fail before the requests in them are given up."""


class EngineCore:
    """The step, over a scheduler and two models that have passed the handshake."""

    def __init__(
        self,
        target: TargetModel,
        draft: DraftModel | None,
        target_link: RunnerLink,
        draft_link: RunnerLink | None,
        geometry: Geometry,
        emit: Callable[[list[StepOutput]], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """emit: takes each step's outputs; must not block."""
        self._target = target
        self._draft = draft
        self._launcher, self._follower = as_launching(target), as_following(draft)
        self._target_link = target_link
        self._draft_link = draft_link
        self._outputs = HeldOutputs(emit)
        self._clock = clock
        self._step_id = 0
        self._num_failed_steps = 0
        self._unread: UnreadDraft | None = None
        """The draft step whose tokens the next verify reads."""
        self._ahead: TargetStep | None = None
        """The next step, if it is launched already."""
        self.times = StepTimes()
        self.geometry = geometry
        self.kv = KvManager(
            block_size=geometry.block_size,
            num_target_blocks=geometry.num_target_blocks,
            num_draft_blocks=geometry.num_draft_blocks,
            enable_prefix_cache=geometry.settings.enable_prefix_cache,
        )
        self.scheduler = Scheduler(geometry.settings, self.kv, geometry.max_model_len, clock)
        self._plans = PlanBuilder(
            self.scheduler.table,
            geometry.block_size,
            geometry.vocab_size,
            launch_ahead=geometry.settings.launch_ahead,
        )
        queueing = as_queueing(target) if geometry.settings.launch_ahead else None
        self._steps_ahead = None if queueing is None else StepsAhead(queueing, self.scheduler, self._plans)

    @property
    def num_steps(self) -> int:
        """Steps that were sent to the target."""
        return self._step_id

    @property
    def is_speculating(self) -> bool:
        """Whether the draft is there."""
        return self.scheduler.is_drafting

    def add(self, sequence: Sequence) -> None:
        """Queue a checked request."""
        self.scheduler.waiting.push(sequence)

    def end(self, sequence: Sequence, finish: Finish) -> bool:
        """End a sequence between steps, without an output. False if it has ended already."""
        self._outputs.flush()
        if sequence.finish is not None:
            return False
        sequence.finish = finish
        self.scheduler.finish(sequence)
        return True

    def flush_outputs(self) -> None:
        """Emit what would be emitted when the next step is on its way."""
        self._outputs.flush()

    def step(self) -> bool:
        """Run one round. False when there was nothing to do, or no target to do it."""
        if not self._reach_target():
            self._outputs.flush()
            return False
        self._reach_draft()
        self.times.start()
        step = self._next_step()
        if step is None:
            self._unread = None
            self._outputs.flush()
            return False
        batch = step.batch
        self.times.lap("schedule")
        launched = self._following_draft(step)
        reply = self._verify(step, launched)
        self.times.lap("target")
        if reply is None:
            return True
        target_s = 1e-6 * reply.runner_us or self.times.since_queued
        self._read_draft(reply)
        commit = commit_step(batch, step.plan, reply, self._clock(), step.still_there)
        self._settle(commit.outputs)
        is_launched = launched is not None and self._keep_launched(launched, reply)
        draft_plan = None if is_launched else self._plan_draft(commit.draft_work, reply.aux)
        if is_launched:
            self._outputs.hold(commit.outputs)
        else:  # last before the call, so that the emitter works while the draft does
            self._outputs.put(commit.outputs)
        self.times.lap("commit")
        self._propose(draft_plan, commit.draft_work)
        draft_s = self.times.lap("draft")
        self._publish(batch.sequences)
        self.times.lap("publish")
        is_pure_decode = batch.num_decodes == len(batch.sequences)
        self.scheduler.policy.end_round(is_pure_decode=is_pure_decode, draft_s=draft_s, target_s=target_s)
        return True

    def _next_step(self) -> TargetStep | None:
        """The one that is launched, or one that is planned now; None when nobody runs."""
        step, self._ahead = self._ahead, None
        if step is not None:
            self.scheduler.ask_policy()  # whoever is to begin drafting begins with the step after this one
        else:
            batch = self.scheduler.schedule()
            if not batch.sequences:
                return None
            left = None if self._unread is None else self._unread.tokens
            step = TargetStep(batch, self._plans.target_plan(self._step_id + 1, batch, left))
        self._step_id = step.plan.step_id
        return step

    def _following_draft(self, step: TargetStep) -> LaunchedDraft | None:
        """The draft's step, to be launched behind the verify; None where it has to wait for the verify's results."""
        if not self.geometry.settings.launch_ahead or not self.scheduler.is_drafting or step.pending is not None:
            return None
        if self._follower is None or self._launcher is None or not self._launcher.can_launch:
            return None
        sequences = step.batch.sequences
        if step.batch.num_decodes < len(sequences) or not any(sequence.uses_draft for sequence in sequences):
            return None
        return LaunchedDraft(self._follower, partial(self._plans.following, step.batch, step.plan))

    def _run(self, step: TargetStep, launched: LaunchedDraft | None) -> TargetReply:
        """Launch what may be launched with the step and behind it, and wait for its reply."""
        if launched is not None and self._launcher is not None:
            return self._launcher.verify_ahead(step.plan, partial(self._launch, launched))
        self._outputs.flush()
        if self._steps_ahead is not None:
            self._ahead = self._steps_ahead.launch(step)
            if self._ahead is not None:
                self.scheduler.policy.think()
        return self._target.verify(step.plan) if step.pending is None else step.pending.wait()

    def _launch(self, launched: LaunchedDraft, aux: AuxHandle, drawn: DrawnHandle) -> None:
        self.times.note_queued()
        launched.launch(aux, drawn)
        self._outputs.flush()
        if launched.reply is not None:
            self.scheduler.policy.think()

    def _verify(self, step: TargetStep, launched: LaunchedDraft | None) -> TargetReply | None:
        """The target's reply; None when the target was lost, its KV with it."""
        try:
            reply = self._run(step, launched)
        except ModelUnavailableError as error:
            self._num_failed_steps += 1
            self._lose_target(str(error))
            if self._num_failed_steps >= MAX_FAILED_STEPS:
                message = f"{self._num_failed_steps} target steps in a row failed: {error}"
                self._fail(step.batch.sequences, message)
            return None
        if reply.runner_epoch != self._target_link.epoch:
            self._lose_target(f"it answers with epoch {reply.runner_epoch}, {self._target_link.epoch} was expected")
            self._target_link.retry_now()
            return None
        if reply.step_id != step.plan.step_id:
            raise KimiError(f"target replied to step {reply.step_id}, {step.plan.step_id} was asked")
        self._num_failed_steps = 0
        self._target_link.note_success()
        self.times.note_runner("target", reply.runner_us)
        return reply

    def _settle(self, outputs: list[StepOutput]) -> None:
        """Free what ended; let the others' last token be the next step's first row."""
        for output in outputs:
            sequence, finish = output.sequence, output.finish
            if finish is None:
                continue
            if finish.cause is EndCause.BAD_LOGITS:
                # Its KV may hold what made the logits bad, and an earlier chunk of it may be published already.
                assert sequence.blocks is not None
                self.kv.withdraw(sequence.blocks)
            else:
                self._publish([sequence])
            self.scheduler.finish(sequence)
        self.scheduler.table.set_last_tokens([output.sequence for output in outputs if output.finish is None])

    def _plan_draft(self, work: list[DraftWork], aux: AuxHandle) -> DraftPlan | None:
        return self._plans.draft_plan(self._step_id, work, aux) if work else None

    def _propose(self, plan: DraftPlan | None, work: list[DraftWork]) -> None:
        """Extend the draft and keep its proposals. Whatever goes wrong turns speculation off and fails nobody."""
        if plan is None or self._draft is None or self._draft_link is None:
            return
        sequences = [w.sequence for w in work]
        try:
            reply = self._draft.propose(plan)
            if not self._is_known_draft(reply):
                return
            self.times.note_runner("draft", reply.runner_us)
            store_proposals(self.scheduler.table, sequences, plan, reply, self.geometry.vocab_size)
        except Exception as error:
            self._lose_draft(f"{type(error).__name__}: {error}")
            return
        self._draft_link.note_success()
        if reply.tokens.num_seqs:
            self._unread = UnreadDraft.of(reply.tokens, work)
            return
        for item, status in zip(work, reply.seq_status.tolist(), strict=True):
            self._settle_draft(item, status)

    def _keep_launched(self, launched: LaunchedDraft, reply: TargetReply) -> bool:
        """Of a draft step launched behind the verify: where its tokens are. False if it is still to be proposed.

        Call it when the step's tokens were appended.
        """
        assert self._draft_link is not None
        if launched.problem is not None:
            self._lose_draft(f"{type(launched.problem).__name__}: {launched.problem}")
            return True
        if launched.reply is None:
            return False
        if not self._is_known_draft(launched.reply):
            return True
        self._unread = launched.unread(reply.num_accepted_tokens)
        store_followed(self.scheduler.table, self._unread.work)
        self._draft_link.note_success()
        return True

    def _is_known_draft(self, reply: DraftReply) -> bool:
        """Whether the draft is the one that was met; it is lost otherwise."""
        assert self._draft_link is not None
        if reply.runner_epoch == self._draft_link.epoch:
            return True
        self._lose_draft(f"it answers with epoch {reply.runner_epoch}, {self._draft_link.epoch} was expected")
        self._draft_link.retry_now()
        return False

    def _read_draft(self, reply: TargetReply) -> None:
        """What the verify says of the draft step whose tokens it read, before any of that counts."""
        unread, self._unread = self._unread, None
        if unread is None:
            return
        if reply.draft_status is None or len(reply.draft_status) != len(unread.work):
            given = None if reply.draft_status is None else len(reply.draft_status)
            raise KimiError(f"target replied with draft_status of {given} sequences, {len(unread.work)} were asked")
        for item, status in unread.still_there(reply.draft_status.tolist()):
            self._settle_draft(item, status)

    def _settle_draft(self, item: DraftWork, status: int) -> None:
        """The draft's rows are valid, or the sequence goes on without it."""
        sequence = item.sequence
        sequence.draft_len += item.num_rows
        if status:
            logger.warning("request_id=%s draft status=%d, goes on without", sequence.request.request_id, status)
            assert sequence.blocks is not None
            if status != STATUS_NO_TOKEN_LEFT:  # what the request bans says nothing of the KV that others share
                self.kv.withdraw_draft(sequence.blocks)
            self.scheduler.drop_draft(sequence)
            sequence.wants_draft = False

    def _publish(self, sequences: Iterable[Sequence]) -> None:
        """Offer the blocks that this step made full and valid to the prefix cache."""
        size = self.kv.block_size
        for sequence in sequences:
            blocks = sequence.blocks
            if blocks is None:
                continue
            if (
                sequence.target_len >= (blocks.num_published_target + 1) * size
                or sequence.publishable_draft_len >= (blocks.num_published_draft + 1) * size
            ):
                self.kv.publish(blocks, sequence.token_ids, sequence.target_len, sequence.publishable_draft_len)

    def _reach_target(self) -> bool:
        link = self._target_link
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
        self.kv.reset_target(description.num_blocks)
        link.accept(description)
        return True

    def _reach_draft(self) -> None:
        link = self._draft_link
        if link is not None and link.has_died:  # rounds without draft tokens would not notice
            self._lose_draft(f"its process {link.process_id} has died")
        if link is None or link.is_up:
            return
        description = link.try_connect()
        if description is None:
            return
        assert self._target_link.description is not None
        try:
            check_runner(description, "draft")
            check_pair(self._target_link.description, description)
            check_limits(description, self.geometry.settings)
        except ConfigError as error:
            link.lose(str(error))
            return
        for sequence in self.scheduler.running.copy():
            if sequence.wants_draft:
                self.scheduler.preempt(sequence)
        self.kv.reset_draft(description.num_blocks)
        self.scheduler.is_drafting = True
        link.accept(description)

    def _lose_target(self, problem: str) -> None:
        self._unread = self._ahead = None
        self._target_link.lose(problem)
        for sequence in self.scheduler.running.copy():
            self.scheduler.preempt(sequence)

    def _lose_draft(self, problem: str) -> None:
        assert self._draft_link is not None
        self._unread = None
        self._draft_link.lose(problem)
        logger.warning("speculation is off until the draft answers again")
        self.scheduler.is_drafting = False
        for sequence in self.scheduler.running:
            if sequence.uses_draft:
                self.scheduler.drop_draft(sequence)
        self.kv.reset_draft(None)

    def _fail(self, sequences: Iterable[Sequence], message: str) -> None:
        now = self._clock()
        finish = Finish(FinishReason.ERROR, error=message, cause=EndCause.TARGET_LOST)
        self._outputs.put([StepOutput(s, now, finish=finish) for s in sequences if self.end(s, finish)])
