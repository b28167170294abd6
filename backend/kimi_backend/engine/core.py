"""One round for all running sequences: plan → launch → wait → commit → emit → draft → publish.

Runs on one thread. What may be launched before the results of what is in flight are known, `in_flight` says; everything
else here is the same whether or not it was. Knows nothing of strings, clients or threads.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial

from kimi_backend.cache.kv_manager import KvManager
from kimi_backend.engine.availability import Availability
from kimi_backend.engine.commit import StepOutput, commit_step
from kimi_backend.engine.handshake import Geometry
from kimi_backend.engine.held_outputs import HeldOutputs
from kimi_backend.engine.in_flight import DraftStep, Step, StepPlanner
from kimi_backend.engine.policy_maker import PolicyMaker
from kimi_backend.engine.runner_link import RunnerLink
from kimi_backend.engine.step_times import StepTimes
from kimi_backend.errors import KimiError, ModelUnavailableError
from kimi_backend.scheduler.plan_builder import PlanBuilder, drawn_by_sequence, store_proposals
from kimi_backend.scheduler.scheduler import Scheduler
from kimi_backend.scheduler.sequence import DraftState, Finish, Sequence
from kimi_backend.spec_decode.protocols import Draft, Target
from kimi_backend.spec_decode.round_times import Round
from kimi_backend.types.plan import STATUS_NO_TOKEN_LEFT, AuxHandle, DraftReply, TargetReply
from kimi_backend.types.request import EndCause, FinishReason

logger = logging.getLogger("kimi_backend.engine")

MAX_FAILED_STEPS = 3
"""Target steps in a row that may fail before the requests in them are given up."""
_IN_BUFFER = AuxHandle(region=0)
"""The aux hidden states of a verify that is not done: in the one region of the buffer that both runners know."""


class EngineCore:
    """The step, over a scheduler and two models that have passed the handshake."""

    def __init__(
        self,
        target: Target,
        draft: Draft | None,
        target_link: RunnerLink,
        draft_link: RunnerLink | None,
        geometry: Geometry,
        emit: Callable[[list[StepOutput]], None],
        clock: Callable[[], float] = time.monotonic,
        last_step_id: int = 0,
    ) -> None:
        """
        Args:
            emit: takes each step's outputs; must not block.
            last_step_id: steps are numbered from the next one on. No other engine over the same runners had more.
        """
        self._target, self._draft = target, draft
        self._outputs = HeldOutputs(emit)
        self._clock = clock
        self._step_id = last_step_id
        self.num_steps = 0
        """Steps that were sent to the target."""
        self._num_failed_steps = 0
        self._flight: deque[Step] = deque()
        self._done: list[Callable[[], Round]] = []
        """Rounds that the policy is told of when the next step is on its way, or when there is none."""
        self._unread: DraftStep | None = None
        """The draft step since the last verify, if its proposals are in the token table."""
        self.times = StepTimes()
        self.geometry = geometry
        self.kv = KvManager(
            block_size=geometry.block_size,
            num_target_blocks=geometry.num_target_blocks,
            num_draft_blocks=geometry.num_draft_blocks,
            enable_prefix_cache=geometry.settings.enable_prefix_cache,
        )
        self.scheduler = Scheduler(geometry.settings, self.kv, geometry.max_model_len, clock)
        policies = PolicyMaker(target, draft, geometry.settings)
        self.runners = Availability(target_link, draft_link, self.kv, self.scheduler, geometry, policies)
        self._plans = PlanBuilder(self.scheduler.table, geometry.block_size, geometry.vocab_size)
        self._planner = StepPlanner(
            target, draft, self.scheduler, self._plans, overlaps=geometry.settings.async_scheduling
        )

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
        """Launch the next step, if it need not wait, and finish those that are due. False when there was nothing to do,
        or no target to do it."""
        if not self.runners.reach_target():
            self._rest()
            return False
        self._reach_draft()
        self.times.start()
        last = self._flight[0] if self._flight else None
        if last is not None and last.is_behind:
            self.scheduler.ask_policy()  # whoever is to begin drafting begins with the step after this one
        step = self._planner.plan(self._step_id + 1, last, self._unread)
        if last is None:
            self._unread = None
        if step is None and last is None:
            self._rest()
            return False
        self.times.lap("schedule")  # looking in vain is no step's time
        if step is not None:
            if not self._launch(step):
                return True
            self._prepare_next()
        while len(self._flight) >= max(0 if step is None else step.depth, 1):
            self._finish(self._flight.popleft())
        return True

    def _rest(self) -> None:
        """There is nothing to launch, so that what comes behind a launch comes now: nobody else would free its
        sequences."""
        self._outputs.flush()
        self._teach_policy()
        self.times.rest()

    def _launch(self, step: Step) -> bool:
        """Launch a step, and the draft's behind it where that need not wait. False when the target was lost."""
        self._step_id = step.plan.step_id
        self.num_steps += 1
        try:
            step.pending = self._target.launch(step.plan)
        except ModelUnavailableError as error:
            self._fail_step(step, error)
            return False
        self.times.launched()
        self._flight.append(step)
        if step.depth == 1:
            index = [i for i, sequence in enumerate(step.batch.sequences) if sequence.uses_draft]
            self._launch_draft(step, index, None)
        self._outputs.flush()
        return True

    def _finish(self, step: Step) -> None:
        """Wait for the oldest step in flight, and let it count."""
        is_overlapped = bool(self._flight) or step.draft is not None
        reply = self._wait(step)
        target_s = self.times.lap("target")
        if is_overlapped:
            target_s = self.times.since_launch  # before it the device may have had nothing to do
        if reply is None:
            return
        self._settle_draft_step(step, reply)
        still_there = step.still_there
        outputs = commit_step(step.batch, step.plan, reply, self._clock(), still_there)
        self._settle(outputs)
        if is_overlapped:
            self._outputs.hold(outputs)
        else:
            self._outputs.put(outputs)  # before the draft's call, so that the emitter works while the draft does
        self.times.lap("commit")
        if not is_overlapped:
            self._launch_draft_after(step, reply, still_there)
        answer = self._keep_proposals(step, reply)
        draft_wait_s = self.times.lap("draft")
        self._publish(step.batch.sequences)
        self.times.lap("publish")
        total_s = self.times.end_round()
        if step.batch.num_decodes == len(step.batch.sequences):
            draft_s = 0.0 if answer is None else 1e-6 * answer.runner_us or draft_wait_s
            target_s = 1e-6 * reply.runner_us or target_s
            times = (total_s, target_s, draft_s, draft_wait_s)
            self._done.append(partial(step.round, *times, is_overlapped=is_overlapped))

    def _prepare_next(self) -> None:
        """Let the policy learn and choose while the models work, so that a round is no longer for it."""
        self._teach_policy()
        self.scheduler.prepare_choice()

    def _teach_policy(self) -> None:
        """Tell it of the rounds that are done."""
        for done in self._done:
            self.scheduler.policy.end_round(done())
        self._done.clear()

    def _wait(self, step: Step) -> TargetReply | None:
        """The target's reply; None when the target was lost, its KV with it."""
        assert step.pending is not None
        link = self.runners.target
        try:
            reply = step.pending.wait()
        except ModelUnavailableError as error:
            self._fail_step(step, error)
            return None
        if reply.runner_epoch != link.epoch:
            self._lose_target(f"it answers with epoch {reply.runner_epoch}, {link.epoch} was expected")
            link.retry_now()
            return None
        if reply.step_id != step.plan.step_id:
            raise KimiError(f"target replied to step {reply.step_id}, {step.plan.step_id} was asked")
        self._num_failed_steps = 0
        link.note_success()
        self.times.note_runner("target", reply.runner_us)
        return reply

    def _fail_step(self, step: Step, error: ModelUnavailableError) -> None:
        self._num_failed_steps += 1
        self._lose_target(str(error))
        if self._num_failed_steps >= MAX_FAILED_STEPS:
            self._fail(step.batch.sequences, f"{self._num_failed_steps} target steps in a row failed: {error}")

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
                self._planner.host_drafts.keep(sequence)
            self.scheduler.finish(sequence)
        self.scheduler.table.set_last_tokens([output.sequence for output in outputs if output.finish is None])

    def _launch_draft_after(self, step: Step, reply: TargetReply, still_there: list[bool]) -> None:
        """Plan the draft's step with what the verify has accepted."""
        index = [
            i
            for i, (sequence, is_there) in enumerate(zip(step.batch.sequences, still_there, strict=True))
            if is_there and sequence.finish is None and sequence.uses_draft
        ]
        self._launch_draft(step, index, reply)

    def _launch_draft(self, step: Step, index: list[int], reply: TargetReply | None) -> None:
        """Launch the draft's step behind a verify. Whatever goes wrong turns speculation off and fails nobody.

        Args:
            index: which of the step's sequences use the draft.
            reply: the verify's; None while it is in flight.
        """
        draft = self._draft
        if draft is None or not index:
            return
        try:
            in_table = draft.depth > 0 and self.geometry.settings.async_scheduling
            in_table = in_table and not any(step.batch.sequences[i].needs_proposals for i in index)
            aux = _IN_BUFFER if reply is None else reply.aux
            plan = self._plans.draft_plan(
                step.batch, step.plan, index, aux, in_table=in_table, knows_all=reply is not None
            )
            if reply is not None:
                drawn, accepted = drawn_by_sequence(step.plan, reply)
                plan = plan.resolved(drawn[index], accepted[index])
            elif not plan.num_proposals.any():
                return
            step.draft = DraftStep(plan, index, [step.batch.sequences[i] for i in index], draft.launch(plan))
        except Exception as error:
            self._lose_draft(f"{type(error).__name__}: {error}")

    def _keep_proposals(self, step: Step, reply: TargetReply) -> DraftReply | None:
        """Take the draft's answer: its proposals, or that they will be in the token table. None where there is none."""
        draft, link = step.draft, self.runners.draft
        if draft is None or link is None or not link.is_up:
            return None
        try:
            answer = draft.pending.wait()
            if not self._is_known_draft(answer):
                return None
            self.times.note_runner("draft", answer.runner_us)
            counts = draft.count(drawn_by_sequence(step.plan, reply)[1][draft.index])
            store_proposals(self.scheduler.table, draft.sequences, draft.plan, counts, answer, self.geometry.vocab_size)
        except Exception as error:
            self._lose_draft(f"{type(error).__name__}: {error}")
            return None
        link.note_success()
        if answer.draft_token_ids is None:
            self._unread = draft
            return answer
        for index, sequence in draft.still_there():
            self._settle_draft(sequence, draft.num_rows[index], int(answer.seq_status[index]))
        return answer

    def _is_known_draft(self, reply: DraftReply) -> bool:
        """Tell whether the draft is the one that was met; it is lost otherwise."""
        link = self.runners.draft
        assert link is not None
        if reply.runner_epoch == link.epoch:
            return True
        self._lose_draft(f"it answers with epoch {reply.runner_epoch}, {link.epoch} was expected")
        link.retry_now()
        return False

    def _settle_draft_step(self, step: Step, reply: TargetReply) -> None:
        """Take what the verify says of the draft step whose proposals it read, before any of that counts."""
        if step.read is None:
            return
        if reply.draft_status is None or len(reply.draft_status) != len(step.batch.sequences):
            given = None if reply.draft_status is None else len(reply.draft_status)
            raise KimiError(
                f"target replied with draft_status of {given} sequences, {len(step.batch.sequences)} were asked"
            )
        status = dict(zip(map(id, step.batch.sequences), reply.draft_status.tolist(), strict=True))
        for index, sequence in step.read.still_there():
            self._settle_draft(sequence, step.read.num_rows[index], status[id(sequence)])

    def _settle_draft(self, sequence: Sequence, num_rows: int, status: int) -> None:
        """The draft's rows are valid, or the sequence goes on without it."""
        sequence.draft_len += num_rows
        if status:
            logger.warning("request_id=%s draft status=%d, goes on without", sequence.request.request_id, status)
            assert sequence.blocks is not None
            if status != STATUS_NO_TOKEN_LEFT:  # what the request bans says nothing of the KV that others share
                self.kv.withdraw_draft(sequence.blocks)
            self.scheduler.drop_draft(sequence, DraftState.NEVER)

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

    def _reach_draft(self) -> None:
        link = self.runners.draft
        if link is not None and link.has_died:  # rounds without draft tokens would not notice
            self._lose_draft(f"its process {link.process_id} has died")
        self.runners.reach_draft()

    def _lose_target(self, problem: str) -> None:
        self._flight.clear()
        self._unread = None
        self.runners.lose_target(problem)

    def _lose_draft(self, problem: str) -> None:
        self._unread = None
        self.runners.lose_draft(problem)

    def _fail(self, sequences: Iterable[Sequence], message: str) -> None:
        now = self._clock()
        finish = Finish(FinishReason.ERROR, error=message, cause=EndCause.TARGET_LOST)
        self._outputs.put([StepOutput(s, now, finish=finish) for s in sequences if self.end(s, finish)])
