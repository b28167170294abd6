"""The steps of a rank other than 0, which rank 0 tells it, on its own slices."""

import dataclasses

import torch

from kimi_backend.runners.aux_ipc import OpenedAuxBuffer, export_aux_buffer
from kimi_backend.runners.cuda_ipc import CudaIpcError
from kimi_backend.runners.draft_runner import DraftRunner
from kimi_backend.runners.hand_over.order import StepOrder, order_of
from kimi_backend.runners.hand_over.semaphores import OpenedSemaphores, SemaphoreError
from kimi_backend.runners.ranks.messages import EXPORT_AUX, OPEN_AUX, OPEN_SEMAPHORES, Step
from kimi_backend.runners.target_runner import TargetRunner
from kimi_backend.types.plan import AuxHandle, TargetPlan


class OutOfStep(Exception):
    """This rank cannot run what rank 0 runs."""


class TensorParallelWorker:
    """The runners of one rank. Puts its own device's tensors in place of those that a plan of rank 0's spoke of."""

    def __init__(self, target: TargetRunner | None, draft: DraftRunner | None) -> None:
        self._target, self._draft = target, draft
        self._order: StepOrder | None = None
        self._opened: OpenedAuxBuffer | None = None

    @property
    def device(self) -> torch.device:
        """The device that both compute on."""
        runner = self._target or self._draft
        assert runner is not None
        return runner.device

    def run(self, step: Step) -> None:
        """Launch a step; nobody here reads its reply.

        Raises:
            OutOfStep: this rank cannot run what rank 0 runs. Then, or where the step raises, it is of no use any more.
        """
        for semaphore, value in step.waits:
            if self._order is not None:
                self._order.wait(semaphore, value)
        plan = step.plan
        if isinstance(plan, TargetPlan):
            if self._target is None:
                raise OutOfStep(f"step {plan.step_id}: this rank has no target")
            self._target.launch(plan)
            return
        if self._draft is None:
            raise OutOfStep(f"step {plan.step_id}: this rank has no draft")
        if step.aux is not None:
            plan = dataclasses.replace(plan, aux=AuxHandle(tensor=step.aux))
        elif self._opened is not None:
            plan = dataclasses.replace(plan, aux=AuxHandle(tensor=self._opened.buffer.resolve(plan.aux)))
        # Nobody reads the reply, so nothing of it need come to the host.
        self._draft.launch(plan)

    def answer(self, question: str, content: bytes) -> bytes:
        """Answer a question of rank 0's."""
        if question == EXPORT_AUX:
            buffer = None if self._target is None else self._target.aux_buffer
            return b"" if buffer is None else export_aux_buffer(buffer)
        if question == OPEN_AUX:
            self._open_aux(content)
        if question == OPEN_SEMAPHORES:
            self._open_semaphores(content)
        return b""

    def _open_semaphores(self, handle: bytes) -> None:
        """An empty handle closes what is open."""
        if self._order is not None:
            order, self._order = self._order, None
            order.close()
        if handle:
            try:
                self._order = order_of(OpenedSemaphores.open(handle).semaphores, self.device)
            except SemaphoreError as error:
                raise CudaIpcError(f"the shared semaphores: {error}") from None

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
