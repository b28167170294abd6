"""The two ends of the shared semaphores: each lets its steps wait for the other's, and is let go when the other has
died.

No circle: a verify waits for a draft step that was queued whole before the verify was sent, a draft step for the verify
that it comes behind. Every number is written: by the host, where a step fails.
"""

import logging
import os
import threading
import time
from collections.abc import Callable

import torch

from kimi_backend.errors import ModelUnavailableError
from kimi_backend.processes import is_alive
from kimi_backend.runners.cuda_ipc import CudaIpcError
from kimi_backend.runners.hand_over.order import order_of
from kimi_backend.runners.hand_over.semaphores import (
    DRAFTED,
    PROMISED,
    QUEUED,
    TARGET_PID,
    VERIFIED,
    WAITED,
    OpenedSemaphores,
    OwnSemaphores,
    SemaphoreError,
)
from kimi_backend.runners.hand_over.token_table import TokenTable, clear_proposals
from kimi_backend.runners.ranks.workers import NO_WORKERS, Workers
from kimi_backend.spec_decode.protocols import Draft, Pending, Target
from kimi_backend.types.plan import DraftPlan, DraftReply, TargetPlan, TargetReply

logger = logging.getLogger("kimi_backend.runners")

LONGEST_WAIT_S = 60.0
"""A step waits no longer for a process that lives: long enough to compile a kernel in."""
LOOK_S = 0.05
"""The pause between two looks of a process whether the other lives."""
PROMISE_S = 1.0
"""A draft step waits so long to hear that the target was given the verify before it."""
_POLL_S = 0.00005
_NOBODY = 0
"""Process id of a target that has left."""
_LAST_STEP_S = 1.0
"""A target that ends waits so long for the draft step that may read its memory."""


class _Watch:
    """Lets a waiting stream go, from a thread of its own."""

    def __init__(
        self, awaited: Callable[[], int | None], other_pid: Callable[[], int], let_go: Callable[[], None]
    ) -> None:
        """awaited: the number that the stream waits for now, or None."""
        self._awaited, self._other_pid, self._let_go = awaited, other_pid, let_go
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kimi-semaphores", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closed.set()
        self._thread.join()

    def _run(self) -> None:
        awaited, since_s = None, time.monotonic()
        while not self._closed.wait(LOOK_S):
            before, awaited = awaited, self._awaited()
            if awaited is None:
                continue
            if awaited != before:  # a stream that waits most of the time waits for one step after another
                since_s = time.monotonic()
            is_late = time.monotonic() - since_s > LONGEST_WAIT_S
            if is_late or not is_alive(self._other_pid()):
                logger.warning("a step waits no longer for the other runner: %s", "late" if is_late else "dead")
                self._let_go()


class DraftSync:
    """The draft's process, which makes the semaphores."""

    def __init__(self, table: TokenTable, device: torch.device, workers: Workers = NO_WORKERS) -> None:
        """
        Args:
            table: the draft's.
            device: the draft's.
            workers: its other ranks.

        Raises:
            SemaphoreError, CudaIpcError: there is no such memory, or the device cannot wait for it.
        """
        self._table = table
        self._own = OwnSemaphores((table.proposed.shape[0], table.proposed.shape[1]))
        self._semaphores = self._own.semaphores
        self._order = order_of(self._semaphores, device, self._own.handle, workers)
        self._watch = _Watch(self._awaited, lambda: self._semaphores.value(TARGET_PID), self._let_go)

    @property
    def handle(self) -> bytes:
        """The handle of the semaphores, for the target."""
        return self._own.handle

    def launch(self, plan: DraftPlan, draft: Draft) -> Pending[DraftReply]:
        """Queue a step, behind its verify if it needs what that draws, and show what it leaves.

        Raises:
            ModelUnavailableError: the target was not given the verify; nothing was run.
        """
        self._semaphores.set_value(QUEUED, plan.step_id)
        try:
            if plan.num_drawn.any():
                self._await_promise(plan.step_id)
                self._semaphores.set_value(WAITED, plan.step_id)
                self._order.wait(VERIFIED, plan.step_id)
                self._order.copy(self._table.drawn, self._semaphores.drawn)
            pending = draft.launch(plan)
            if plan.in_table:
                self._order.copy(self._semaphores.proposed, self._table.proposed)
        except BaseException:
            self._show_failed(plan.step_id)
            raise
        self._order.write(DRAFTED, plan.step_id)
        return pending

    def close(self) -> None:
        """Nothing of it is on its way afterwards."""
        self._watch.close()
        if self._awaited() is not None:
            self._let_go()
        self._order.close()
        self._own.close()

    def _await_promise(self, step_id: int) -> None:
        """The device is never made to wait for a verify that the target was not given."""
        deadline_s = time.monotonic() + PROMISE_S
        while self._semaphores.value(PROMISED) != step_id:
            if time.monotonic() > deadline_s or self._semaphores.value(TARGET_PID) == _NOBODY:
                raise ModelUnavailableError(f"draft step {step_id}: the target was not given the verify before it")
            time.sleep(_POLL_S)

    def _show_failed(self, step_id: int) -> None:
        """Show a failed step: what it has left is stamped with an earlier one."""
        try:
            self._order.write(DRAFTED, step_id)
        except CudaIpcError:  # the device is lost
            self._semaphores.set_value(DRAFTED, step_id)

    def _awaited(self) -> int | None:
        number = self._semaphores.value(WAITED)
        return number if self._semaphores.value(VERIFIED) < number else None

    def _let_go(self) -> None:
        """Let the other go on as if nothing had been accepted."""
        self._semaphores.drawn.zero_()
        self._semaphores.set_value(VERIFIED, self._semaphores.value(WAITED))


def make_draft_sync(table: TokenTable | None, device: torch.device, workers: Workers = NO_WORKERS) -> DraftSync | None:
    """table: None for a runner that has none. None where draft and target have to wait for each other's replies, which
    is logged."""
    if table is None:
        return None
    try:
        return DraftSync(table, device, workers)
    except (SemaphoreError, CudaIpcError) as error:
        logger.warning("the draft is waited for in its calls: no shared semaphores: %s", error)
        return None


class TargetSync:
    """The target's process: one draft's semaphores at a time."""

    def __init__(self, table: TokenTable | None, device: torch.device, workers: Workers = NO_WORKERS) -> None:
        """
        Args:
            table: the target's; None for a runner that has none, which opens none.
            device: the target's.
            workers: its other ranks.
        """
        self._table, self._device, self._workers = table, device, workers
        self._lines: _TargetLines | None = None
        self._handle: bytes | None = None

    def open(self, handle: bytes | None) -> bytes | None:
        """Map a draft's semaphores in place of those before. Returns the handle that is open now, or None."""
        if handle == self._handle:
            return handle
        self.close()
        if handle is None or self._table is None:
            return None
        try:
            opened = OpenedSemaphores.open(handle)
            if opened.semaphores.shape != tuple(self._table.drawn.shape):
                raise SemaphoreError(f"its halves are {opened.semaphores.shape}, here {tuple(self._table.drawn.shape)}")
            self._lines = _TargetLines(opened, self._table, self._device, self._workers)
        except (SemaphoreError, CudaIpcError) as error:
            logger.warning("the draft is waited for in its calls: its semaphores cannot be opened: %s", error)
            return None
        self._handle = handle
        return handle

    def launch(self, plan: TargetPlan, target: Target) -> Pending[TargetReply]:
        """Queue a step, after the draft step whose proposals it reads, and show what it draws."""
        if self._lines is not None:
            return self._lines.launch(plan, target)
        if self._table is not None and self._table.is_split:
            clear_proposals(self._table.proposed)
        return target.launch(plan)

    def close(self) -> None:
        """Leave the semaphores alone."""
        self._handle = None
        lines, self._lines = self._lines, None
        if lines is not None:
            lines.close()


class _TargetLines:
    """Opened semaphores, as the target uses them."""

    def __init__(self, opened: OpenedSemaphores, table: TokenTable, device: torch.device, workers: Workers) -> None:
        """Raises CudaIpcError: the device cannot wait for it."""
        self._semaphores, self._table = opened.semaphores, table
        self._order = order_of(self._semaphores, device, opened.handle, workers)
        self._last_awaited = 0
        """The draft step that the last verify waits for."""
        self._semaphores.set_value(TARGET_PID, os.getpid())
        # What the draft awaits of another target will not come.
        self._semaphores.set_value(PROMISED, 0)
        self._semaphores.set_value(VERIFIED, max(self._semaphores.value(VERIFIED), self._semaphores.value(WAITED)))
        self._watch = _Watch(self._awaited, lambda: opened.owner_pid, self._let_go)

    def launch(self, plan: TargetPlan, target: Target) -> Pending[TargetReply]:
        """See `TargetSync.launch`. The draft is let go even if nothing comes of the step."""
        is_new = max(self._semaphores.value(PROMISED), self._semaphores.value(VERIFIED)) < plan.step_id
        if is_new:  # values only grow
            self._semaphores.set_value(PROMISED, plan.step_id)
        try:
            # The draft step behind this one may be queued already, and waits for it: it is not to be waited for.
            before = min(plan.draft_step, self._semaphores.value(QUEUED))
            if self._semaphores.value(DRAFTED) < before:
                self._last_awaited = before
                self._order.wait(DRAFTED, before)
            if plan.draft_step:
                self._order.copy(self._table.proposed, self._semaphores.proposed)
            pending = target.launch(plan)
            if is_new and plan.wants_aux.any():
                self._order.copy(self._semaphores.drawn, self._table.drawn)
                self._order.write(VERIFIED, plan.step_id)
        except BaseException:
            if is_new:
                self._semaphores.set_value(VERIFIED, plan.step_id)
            raise
        return pending

    def close(self) -> None:
        """Nothing of it is on its way afterwards, and the draft reads nothing of this process."""
        self._watch.close()
        self._semaphores.set_value(PROMISED, 0)
        self._semaphores.set_value(TARGET_PID, _NOBODY)
        if self._semaphores.value(VERIFIED) < self._semaphores.value(WAITED):
            self._semaphores.set_value(VERIFIED, self._semaphores.value(WAITED))
        deadline_s = time.monotonic() + _LAST_STEP_S
        while self._semaphores.value(DRAFTED) < self._semaphores.value(QUEUED) and time.monotonic() < deadline_s:
            time.sleep(_LAST_STEP_S / 100)
        self._let_go()
        self._order.close()

    def _awaited(self) -> int | None:
        return self._last_awaited if self._semaphores.value(DRAFTED) < self._last_awaited else None

    def _let_go(self) -> None:
        """Let the other go on: what the draft has left is stamped with an earlier step than is asked for."""
        if self._semaphores.value(DRAFTED) < self._semaphores.value(QUEUED):
            self._semaphores.set_value(DRAFTED, self._semaphores.value(QUEUED))
