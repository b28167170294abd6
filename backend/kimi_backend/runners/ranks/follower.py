"""What a rank other than 0 does: the steps that rank 0 tells it, on its own slices."""

import dataclasses

import torch

from kimi_backend.parallel import SingleRank, TensorParallelGroup
from kimi_backend.runners.aux_ipc import OpenedAuxBuffer, export_aux_buffer
from kimi_backend.runners.draft_runner import DraftRunner
from kimi_backend.runners.ranks.board_words import BoardWords
from kimi_backend.runners.ranks.messages import Method, Step
from kimi_backend.runners.ranks.peers import share
from kimi_backend.runners.target_runner import TargetRunner
from kimi_backend.types.plan import AuxHandle, DraftPlan, DrawnHandle, TargetPlan

EXPORT_AUX = "export aux"
OPEN_AUX = "open aux"
OPEN_BOARD = "open board"


class OutOfStep(Exception):
    """This rank cannot run what rank 0 runs."""


class Follower:
    """The runners of one rank. Puts its own device's tensors in place of those that a plan of rank 0's spoke of."""

    def __init__(
        self, target: TargetRunner | None, draft: DraftRunner | None, group: TensorParallelGroup | None = None
    ) -> None:
        """group: this rank's, for what rank 0 shares."""
        self._target, self._draft = target, draft
        self._group = group or SingleRank()
        self._board: BoardWords | None = None
        self._drawn: DrawnHandle | None = None
        """Of the last verify, where it stays on the device."""
        self._opened: OpenedAuxBuffer | None = None

    @property
    def device(self) -> torch.device:
        """That both compute on."""
        runner = self._target or self._draft
        assert runner is not None
        return runner.device

    def run(self, step: Step) -> None:
        """Raises OutOfStep, or whatever the step raises: in both cases this rank is of no use any more."""
        for offset, value in step.waits:
            if self._board is not None:
                self._board.wait(offset, value)
        if isinstance(step.plan, TargetPlan):
            if self._target is None:
                raise OutOfStep(f"{step.method.value}: this rank has no target")
            self._run_target(self._target, step, step.plan)
            return
        if self._draft is None:
            raise OutOfStep(f"{step.method.value}: this rank has no draft")
        self._run_draft(self._draft, step, step.plan)

    def answer(self, question: str, content: bytes) -> bytes:
        """Of a question of rank 0's."""
        if question == EXPORT_AUX:
            buffer = None if self._target is None else self._target.aux_buffer
            return b"" if buffer is None else export_aux_buffer(buffer)
        if question == OPEN_AUX:
            self._open_aux(content)
        if question == OPEN_BOARD:
            self._open_board(content)
        return b""

    def _received(self, step: Step) -> list[torch.Tensor]:
        """What rank 0 shares."""
        zeros = [torch.zeros(shape, dtype=getattr(torch, name), device=self.device) for shape, name in step.shared]
        return share(self._group, zeros)

    def _run_target(self, target: TargetRunner, step: Step, plan: TargetPlan) -> None:
        if step.method is Method.LAUNCH:
            if target.launch(plan) is None:
                raise OutOfStep(f"step {plan.step_id} cannot be launched here")
            return
        if plan.draft_tokens.num_seqs:
            received = self._received(step)
            left = received[0] if received else None if self._draft is None else self._draft.left_tokens
            plan = dataclasses.replace(plan, draft_tokens=dataclasses.replace(plan.draft_tokens, tensor=left))
        self._drawn = target.verify_unheard(plan)

    def _run_draft(self, draft: DraftRunner, step: Step, plan: DraftPlan) -> None:
        if step.aux is not None:
            plan = dataclasses.replace(plan, aux=AuxHandle(tensor=step.aux))
        elif self._opened is not None:
            plan = dataclasses.replace(plan, aux=AuxHandle(tensor=self._opened.buffer.resolve(plan.aux)))
        if step.method is Method.PROPOSE:
            # Nobody reads the reply, so nothing of it need come to the host.
            draft.propose(dataclasses.replace(plan, leaves_tokens=True))
            return
        received = self._received(step)
        drawn = DrawnHandle(output_token_ids=received[0], num_accepted_tokens=received[1]) if received else self._drawn
        if plan.follow is None or drawn is None:
            raise OutOfStep(f"draft step {plan.step_id}: nothing to follow")
        follow = dataclasses.replace(plan.follow, drawn=drawn)
        if draft.follow(dataclasses.replace(plan, follow=follow)) is None:
            raise OutOfStep(f"draft step {plan.step_id} cannot follow here")

    def _open_board(self, handle: bytes) -> None:
        """An empty handle closes what is open."""
        if self._board is not None:
            board, self._board = self._board, None
            board.close()
        if handle:
            self._board = BoardWords(handle, self.device)

    def _open_aux(self, handle: bytes) -> None:
        """An empty handle closes what is open."""
        if self._opened is not None:
            self._opened.close()
            self._opened = None
        if handle and self._draft is not None:
            self._opened = OpenedAuxBuffer(handle, self._draft.device)

    def drop_captures(self) -> None:
        """See `TargetRunner.drop_captures`."""
        for runner in (self._target, self._draft):
            if runner is not None:
                runner.drop_captures()
