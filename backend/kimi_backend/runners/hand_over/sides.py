"""The two ends of the board: each lets its steps wait for the other's, and is let go when the other has died.

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
from kimi_backend.runners.hand_over.board import (
    LEFT,
    PROMISED,
    QUEUED,
    TARGET_PID,
    VERIFIED,
    WAITED,
    BoardError,
    OpenedBoard,
    OwnBoard,
)
from kimi_backend.runners.hand_over.order import order_of
from kimi_backend.runners.hand_over.token_table import TokenTable, clear_proposals
from kimi_backend.runners.ranks.workers import NO_WORKERS, Workers
from kimi_backend.spec_decode.protocols import Draft, Pending, Target
from kimi_backend.types.plan import DraftPlan, DraftReply, TargetPlan, TargetReply

logger = logging.getLogger("kimi_backend.runners")

LONGEST_WAIT_S = 60.0
"""A step waits no longer for a process that lives: long enough to compile a kernel in."""
LOOK_S = 0.05
"""So often a process looks whether the other lives."""
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
        self._thread = threading.Thread(target=self._run, name="kimi-board", daemon=True)
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


class DraftSide:
    """The draft's process, which makes the board."""

    def __init__(self, table: TokenTable, device: torch.device, workers: Workers = NO_WORKERS) -> None:
        """
        Args:
            table: the draft's.
            device: the draft's.
            workers: its other ranks.

        Raises:
            BoardError, CudaIpcError: there is no such memory, or the device cannot wait for it.
        """
        self._table = table
        self._own = OwnBoard((table.proposed.shape[0], table.proposed.shape[1]))
        self._board = self._own.board
        self._order = order_of(self._board, device, self._own.handle, workers)
        self._watch = _Watch(self._awaited, lambda: self._board.word(TARGET_PID), self._let_go)

    @property
    def handle(self) -> bytes:
        """For the target."""
        return self._own.handle

    def launch(self, plan: DraftPlan, draft: Draft) -> Pending[DraftReply]:
        """Queue a step, behind its verify if it needs what that draws, and show what it leaves.

        Raises:
            ModelUnavailableError: the target was not given the verify; nothing was run.
        """
        self._board.set_word(QUEUED, plan.step_id)
        try:
            if plan.num_drawn.any():
                self._await_promise(plan.step_id)
                self._board.set_word(WAITED, plan.step_id)
                self._order.wait(VERIFIED, plan.step_id)
                self._order.copy(self._table.drawn, self._board.drawn)
            pending = draft.launch(plan)
            if plan.in_table:
                self._order.copy(self._board.proposed, self._table.proposed)
        except BaseException:
            self._show_failed(plan.step_id)
            raise
        self._order.write(LEFT, plan.step_id)
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
        while self._board.word(PROMISED) != step_id:
            if time.monotonic() > deadline_s or self._board.word(TARGET_PID) == _NOBODY:
                raise ModelUnavailableError(f"draft step {step_id}: the target was not given the verify before it")
            time.sleep(_POLL_S)

    def _show_failed(self, step_id: int) -> None:
        """Show a failed step: what it has left is stamped with an earlier one."""
        try:
            self._order.write(LEFT, step_id)
        except CudaIpcError:  # the device is lost
            self._board.set_word(LEFT, step_id)

    def _awaited(self) -> int | None:
        number = self._board.word(WAITED)
        return number if self._board.word(VERIFIED) < number else None

    def _let_go(self) -> None:
        """Let the other go on as if nothing had been accepted."""
        self._board.drawn.zero_()
        self._board.set_word(VERIFIED, self._board.word(WAITED))


def make_draft_side(table: TokenTable | None, device: torch.device, workers: Workers = NO_WORKERS) -> DraftSide | None:
    """table: None for a runner that has none. None where draft and target have to wait for each other's replies, which
    is logged."""
    if table is None:
        return None
    try:
        return DraftSide(table, device, workers)
    except (BoardError, CudaIpcError) as error:
        logger.warning("the draft is waited for in its calls: no board: %s", error)
        return None


class TargetSide:
    """The target's process: one draft's board at a time."""

    def __init__(self, table: TokenTable | None, device: torch.device, workers: Workers = NO_WORKERS) -> None:
        """
        Args:
            table: the target's; None for a runner that has none, which opens no board.
            device: the target's.
            workers: its other ranks.
        """
        self._table, self._device, self._workers = table, device, workers
        self._lines: _TargetLines | None = None
        self._handle: bytes | None = None

    def open(self, handle: bytes | None) -> bytes | None:
        """Map a draft's board in place of the one before. Returns the handle that is open now, or None."""
        if handle == self._handle:
            return handle
        self.close()
        if handle is None or self._table is None:
            return None
        try:
            opened = OpenedBoard.open(handle)
            if opened.board.shape != tuple(self._table.drawn.shape):
                raise BoardError(f"its halves are {opened.board.shape}, here {tuple(self._table.drawn.shape)}")
            self._lines = _TargetLines(opened, self._table, self._device, self._workers)
        except (BoardError, CudaIpcError) as error:
            logger.warning("the draft is waited for in its calls: its board cannot be opened: %s", error)
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
        """Leave the board alone."""
        self._handle = None
        lines, self._lines = self._lines, None
        if lines is not None:
            lines.close()


class _TargetLines:
    """An open board, as the target uses it."""

    def __init__(self, opened: OpenedBoard, table: TokenTable, device: torch.device, workers: Workers) -> None:
        """Raises CudaIpcError: the device cannot wait for it."""
        self._board, self._table = opened.board, table
        self._order = order_of(self._board, device, opened.handle, workers)
        self._last_awaited = 0
        """The draft step that the last verify waits for."""
        self._board.set_word(TARGET_PID, os.getpid())
        # What the draft awaits of another target will not come.
        self._board.set_word(PROMISED, 0)
        self._board.set_word(VERIFIED, max(self._board.word(VERIFIED), self._board.word(WAITED)))
        self._watch = _Watch(self._awaited, lambda: opened.owner_pid, self._let_go)

    def launch(self, plan: TargetPlan, target: Target) -> Pending[TargetReply]:
        """See `TargetSide.launch`. The draft is let go even if nothing comes of the step."""
        is_new = max(self._board.word(PROMISED), self._board.word(VERIFIED)) < plan.step_id
        if is_new:  # words only grow
            self._board.set_word(PROMISED, plan.step_id)
        try:
            # The draft step behind this one may be queued already, and waits for it: it is not to be waited for.
            before = min(plan.draft_step, self._board.word(QUEUED))
            if self._board.word(LEFT) < before:
                self._last_awaited = before
                self._order.wait(LEFT, before)
            if plan.draft_step:
                self._order.copy(self._table.proposed, self._board.proposed)
            pending = target.launch(plan)
            if is_new and plan.wants_aux.any():
                self._order.copy(self._board.drawn, self._table.drawn)
                self._order.write(VERIFIED, plan.step_id)
        except BaseException:
            if is_new:
                self._board.set_word(VERIFIED, plan.step_id)
            raise
        return pending

    def close(self) -> None:
        """Nothing of it is on its way afterwards, and the draft reads nothing of this process."""
        self._watch.close()
        self._board.set_word(PROMISED, 0)
        self._board.set_word(TARGET_PID, _NOBODY)
        if self._board.word(VERIFIED) < self._board.word(WAITED):
            self._board.set_word(VERIFIED, self._board.word(WAITED))
        deadline_s = time.monotonic() + _LAST_STEP_S
        while self._board.word(LEFT) < self._board.word(QUEUED) and time.monotonic() < deadline_s:
            time.sleep(_LAST_STEP_S / 100)
        self._let_go()
        self._order.close()

    def _awaited(self) -> int | None:
        return self._last_awaited if self._board.word(LEFT) < self._last_awaited else None

    def _let_go(self) -> None:
        """Let the other go on: what the draft has left is stamped with an earlier step than is asked for."""
        if self._board.word(LEFT) < self._board.word(QUEUED):
            self._board.set_word(LEFT, self._board.word(QUEUED))
