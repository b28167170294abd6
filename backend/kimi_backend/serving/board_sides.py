"""The two ends of the board, in the runners' servers: each lets its steps wait for the other's, and is let go when the
other has died."""

import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from kimi_backend.runners.cuda_ipc import CudaIpcError
from kimi_backend.runners.ranks.peers import NO_PEERS, Peers
from kimi_backend.serving.board_order import order_of
from kimi_backend.serving.processes import is_alive
from kimi_backend.serving.step_board import (
    LAST_STAMP,
    LEFT,
    PROMISED,
    QUEUED,
    TARGET_PID,
    VERIFIED,
    WAITED,
    BoardError,
    OpenedBoard,
    OwnBoard,
    leave_nothing,
)
from kimi_backend.spec_decode.protocols import TargetModel, as_launching
from kimi_backend.types.plan import AuxHandle, DraftReply, DrawnHandle, TargetPlan, TargetReply, TokenHandle
from kimi_backend.types.request import MAX_SPECULATIVE_TOKENS

logger = logging.getLogger("kimi_backend.serving")

LONGEST_WAIT_S = 60.0
"""A step waits no longer for a process that lives: long enough to compile a kernel in."""
LOOK_S = 0.05
"""So often a process looks whether the other lives."""
PROMISE_S = 1.0
"""A draft step that should follow a verify waits so long to hear that the target was given one."""
_PROMISE_POLL_S = 0.00005
_NOBODY = 0
"""Process id of a target that has left."""
_LAST_STEP_S = 1.0
"""A target that ends waits so long for the draft step that may read its memory."""


class _Watch:
    """Lets a waiting stream go, from a thread of its own."""

    def __init__(
        self, awaited: Callable[[], int | None], peer_pid: Callable[[], int], let_go: Callable[[], None]
    ) -> None:
        """awaited: the number that the stream waits for now, or None."""
        self._awaited, self._peer_pid, self._let_go = awaited, peer_pid, let_go
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
            if is_late or not is_alive(self._peer_pid()):
                logger.warning("a step waits no longer for the other runner: %s", "late" if is_late else "dead")
                self._let_go()


class DraftSide:
    """Of the draft's server, which makes the board."""

    def __init__(self, shape: tuple[int, int], device: torch.device, peers: Peers = NO_PEERS) -> None:
        """
        Args:
            shape: of the array that the draft leaves.
            device: the draft's.
            peers: its other ranks.

        Raises:
            BoardError, CudaIpcError: there is no such memory, or the device cannot wait for it.
        """
        self._own = OwnBoard(shape)
        self._board = self._own.board
        self._order = order_of(self._board, device, self._own.memory_handle, peers)
        self._drawn = self._board.drawn.like(device)
        self._num_steps = 0
        self._watch = _Watch(self._awaited, lambda: self._board.word(TARGET_PID), self._let_go)

    @property
    def handle(self) -> bytes:
        """For the target."""
        return self._own.handle

    def follow(self, stamp: int, step: Callable[[DrawnHandle], DraftReply | None]) -> DraftReply | None:
        """Queue a step behind the verify that will be shown under this stamp. step: given what that drew.

        Returns:
            None when it cannot follow: the device is never made to wait for a stamp that the target was not given.
        """
        if not self._is_promised(stamp):
            logger.warning("a draft step follows no verify: the target was not given one of its stamp")
            return None

        def behind() -> DraftReply | None:
            self._board.set_word(WAITED, stamp)
            self._order.wait(VERIFIED, stamp)
            self._order.copy(self._drawn.whole, self._board.drawn.whole)
            return step(
                DrawnHandle(output_token_ids=self._drawn.token_ids, num_accepted_tokens=self._drawn.num_accepted)
            )

        return self._numbered(behind)

    def leave(self, step: Callable[[], DraftReply]) -> DraftReply:
        """Run a step that may leave its tokens; those go to the board."""
        reply = self._numbered(step)
        assert reply is not None
        return reply

    def close(self) -> None:
        """Nothing of it is on its way afterwards."""
        self._watch.close()
        if self._awaited() is not None:
            self._let_go()
        self._order.close()
        self._own.close()

    def _is_promised(self, stamp: int) -> bool:
        """Whether the target was given a verify of this stamp, which is on its way there beside this call."""
        deadline_s = time.monotonic() + PROMISE_S
        while self._board.word(PROMISED) != stamp:
            if self._board.word(TARGET_PID) == _NOBODY or time.monotonic() > deadline_s:
                return False
            time.sleep(_PROMISE_POLL_S)
        return True

    def _numbered(self, step: Callable[[], DraftReply | None]) -> DraftReply | None:
        """The target waits for every number, so each is shown, whatever becomes of its step."""
        self._num_steps += 1
        number = self._num_steps
        self._board.set_word(QUEUED, number)
        try:
            reply = step()
            if reply is not None and reply.tokens.num_seqs:
                left: Any = reply.tokens.tensor
                self._order.copy(self._board.left, left)
                reply = replace(reply, tokens=TokenHandle(num_seqs=reply.tokens.num_seqs, region=number))
        except BaseException:
            self._show_failed(number)
            raise
        self._order.write(LEFT, number)
        return reply

    def _show_failed(self, number: int) -> None:
        try:
            self._order.write(LEFT, number)
        except CudaIpcError:  # the device is lost
            self._board.show_nothing_left(number)

    def _awaited(self) -> int | None:
        stamp = self._board.word(WAITED)
        return stamp if self._board.word(VERIFIED) < stamp else None

    def _let_go(self) -> None:
        self._board.show_nothing_drawn(self._board.word(WAITED))


def make_draft_side(shape: tuple[int, int] | None, device: torch.device, peers: Peers = NO_PEERS) -> DraftSide | None:
    """shape: None for a runner that leaves no tokens. None where draft and target have to wait for each other's
    replies, which is logged."""
    if shape is None:
        return None
    try:
        return DraftSide(shape, device, peers)
    except (BoardError, CudaIpcError) as error:
        logger.warning("the draft is waited for in its calls: no board: %s", error)
        return None


class TargetSide:
    """Of the target's server: one draft's board at a time."""

    def __init__(self, device: torch.device, peers: Peers = NO_PEERS) -> None:
        """
        Args:
            device: the target's.
            peers: its other ranks.
        """
        self._device, self._peers = device, peers
        self._lines: _TargetLines | None = None
        self._handle: bytes | None = None

    def open(self, handle: bytes | None) -> bytes | None:
        """Map a draft's board in place of the one before. Returns the handle that is open now, or None."""
        if handle == self._handle:
            return handle
        self.close()
        if handle is None:
            return None
        try:
            self._lines = _TargetLines(OpenedBoard.open(handle), self._device, self._peers)
        except (BoardError, CudaIpcError) as error:
            logger.warning("the draft is waited for in its calls: its board cannot be opened: %s", error)
            return None
        self._handle = handle
        return handle

    def verify(self, plan: TargetPlan, target: TargetModel) -> TargetReply:
        """Run a step, after the draft's last one, with the tokens that the plan names; show what a draft follows."""
        lines = self._lines
        if lines is None:
            return target.verify(_without_tokens(plan))
        is_followed = lines.promise(plan.stamp)
        plan = lines.with_tokens(plan)
        return lines.verify_shown(plan, target) if is_followed else target.verify(plan)

    def close(self) -> None:
        """Leave the board alone."""
        self._handle = None
        lines, self._lines = self._lines, None
        if lines is not None:
            lines.close()


class _TargetLines:
    """An open board, as the target uses it."""

    def __init__(self, opened: OpenedBoard, device: torch.device, peers: Peers) -> None:
        """Raises CudaIpcError: the device cannot wait for it."""
        self._board = opened.board
        self._order = order_of(self._board, device, opened.memory_handle, peers)
        self._drawn = self._board.drawn.like(device)
        self._left = torch.empty_like(self._board.left, device=device)
        self._last_awaited = 0
        """Number of the draft step that the last verify waits for."""
        self._board.set_word(TARGET_PID, os.getpid())
        # What the draft awaits of another target will not come.
        self._board.set_word(PROMISED, 0)
        self._board.set_word(VERIFIED, max(self._board.word(VERIFIED), self._board.word(WAITED)))
        self._watch = _Watch(self._awaited, lambda: opened.owner_pid, self._let_go)

    def promise(self, stamp: int) -> bool:
        """Tell the draft that a verify of this stamp will be shown. False if none will: it is not a new one."""
        if not max(self._board.word(PROMISED), self._board.word(VERIFIED)) < stamp <= LAST_STAMP:
            return False
        self._board.set_word(PROMISED, stamp)
        return True

    def with_tokens(self, plan: TargetPlan) -> TargetPlan:
        """Queue the wait for the draft's last step before this one. The plan with its tokens, as an array of this
        process.

        The draft step that follows this one may be queued already, and waits for it: it is not to be waited for.
        """
        before = min(plan.draft_step, self._board.word(QUEUED))
        if self._board.word(LEFT) < before:
            self._last_awaited = before
            self._order.wait(LEFT, before)
        tokens = plan.draft_tokens
        if not tokens.num_seqs:
            return plan
        if tokens.region != before or tokens.num_seqs > self._left.shape[1]:
            logger.warning("tokens of the draft did not come (number %s of %d)", tokens.region, before)
            return _without_tokens(plan)
        self._order.copy(self._left, self._board.left)
        return replace(plan, draft_tokens=TokenHandle(num_seqs=tokens.num_seqs, tensor=self._left))

    def verify_shown(self, plan: TargetPlan, target: TargetModel) -> TargetReply:
        """A verify that a draft follows. It is let go even if nothing comes of the verify."""
        is_shown = False

        def show(_: AuxHandle, drawn: DrawnHandle) -> None:
            nonlocal is_shown
            self._show(plan.stamp, drawn)
            is_shown = True

        try:
            launching = as_launching(target)
            reply = target.verify(plan) if launching is None else launching.verify_ahead(plan, show)
        except BaseException:
            self._board.show_nothing_drawn(plan.stamp)
            raise
        if not is_shown:
            self._show_reply(plan.stamp, reply)
        return reply

    def close(self) -> None:
        """Nothing of it is on its way afterwards, and the draft reads nothing of this process."""
        self._watch.close()
        self._board.set_word(PROMISED, 0)
        self._board.set_word(TARGET_PID, _NOBODY)
        if self._board.word(VERIFIED) < self._board.word(WAITED):
            self._board.show_nothing_drawn(self._board.word(WAITED))
        deadline_s = time.monotonic() + _LAST_STEP_S
        while self._board.word(LEFT) < self._board.word(QUEUED) and time.monotonic() < deadline_s:
            time.sleep(_LAST_STEP_S / 100)
        self._let_go()
        self._order.close()

    def _show(self, stamp: int, drawn: DrawnHandle) -> None:
        """What the device draws."""
        tokens: Any = drawn.output_token_ids
        accepted: Any = drawn.num_accepted_tokens
        _fill(self._drawn.token_ids, tokens)
        _fill(self._drawn.num_accepted, accepted)
        self._order.copy(self._board.drawn.whole, self._drawn.whole)
        self._order.write(VERIFIED, stamp)

    def _show_reply(self, stamp: int, reply: TargetReply) -> None:
        """What the host has got already, of a step that no graph holds."""
        _fill(self._board.drawn.token_ids, torch.tensor(reply.output_token_ids))
        _fill(self._board.drawn.num_accepted, torch.tensor(reply.num_accepted_tokens))
        self._board.set_word(VERIFIED, stamp)

    def _awaited(self) -> int | None:
        return self._last_awaited if self._board.word(LEFT) < self._last_awaited else None

    def _let_go(self) -> None:
        if self._board.word(LEFT) < self._board.word(QUEUED):
            self._board.show_nothing_left(self._board.word(QUEUED))


def _fill(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy the part that both have."""
    part = tuple(slice(min(a, b)) for a, b in zip(target.shape, source.shape, strict=True))
    target[part].copy_(source[part])


def _without_tokens(plan: TargetPlan) -> TargetPlan:
    """The plan, with tokens that say that the draft failed where it names some."""
    num_seqs = plan.draft_tokens.num_seqs
    if not num_seqs:
        return plan
    nothing = torch.empty((1 + MAX_SPECULATIVE_TOKENS, num_seqs), dtype=torch.int32)
    leave_nothing(nothing)
    return replace(plan, draft_tokens=TokenHandle(num_seqs=num_seqs, tensor=nothing))
