"""How aux hidden states get from the target's process to the draft's: a shared GPU buffer, or a tensor a step.

A GPU tensor costs about 0.7 ms on its way through the server, so where both runners share a GPU the draft opens the
target's buffer once and a step names a region of it. The engine's process decides step by step: it knows what the
target offered last and what the draft has opened. The draft's board, which the target opens, likewise (`step_board`).
"""

import itertools
import logging
import time

logger = logging.getLogger("kimi_backend.serving")


class Transfer:
    """Memory of one runner's that the other is to open, as the engine's process knows of it."""

    def __init__(self) -> None:
        self._offered: bytes | None = None
        self._tried: bytes | None = None
        self._opened: bytes | None = None

    @property
    def is_open(self) -> bool:
        """Whether the other has opened what its owner offers now."""
        return self._offered is not None and self._opened == self._offered

    @property
    def to_open(self) -> bytes | None:
        """The handle that the other has to open, when it has not been asked to yet."""
        return self._offered if self._tried != self._offered else None

    @property
    def offered(self) -> bytes | None:
        """The owner's handle."""
        return self._offered

    def offer(self, handle: bytes | None) -> None:
        """The owner described itself: its handle, None where it shares none."""
        self._offered = handle

    def answer(self, opened: bytes | None) -> None:
        """The other described itself, having been given the offered handle: what it has opened."""
        self._tried, self._opened = self._offered, opened


class AuxTransfer(Transfer):
    """The target's buffer of aux hidden states: when the draft reads it, no tensor need travel."""

    def offer(self, handle: bytes | None) -> None:
        """See `Transfer.offer`."""
        if handle is None:
            logger.info("aux hidden states travel as tensors: the target shares no buffer")
        super().offer(handle)

    def answer(self, opened: bytes | None) -> None:
        """See `Transfer.answer`."""
        super().answer(opened)
        if self.is_open:
            logger.info("aux hidden states stay on the GPU: the draft reads the target's buffer")
        elif self.offered is not None:
            logger.warning("aux hidden states travel as tensors: the draft cannot open the buffer, see its log")


class BoardTransfer(Transfer):
    """The draft's board: when the target has opened it, their steps wait for each other on the GPU."""

    def __init__(self) -> None:
        super().__init__()
        # Stamps of another engine over the same runners were less.
        self._stamps = itertools.count(time.time_ns())
        self.draft_step = 0
        """Number of the draft's last step that left tokens."""

    def offer(self, handle: bytes | None) -> None:
        """See `Transfer.offer`."""
        if handle != self.offered:
            self.draft_step = 0
        super().offer(handle)

    def next_stamp(self) -> int:
        """For a verify that a draft follows."""
        return next(self._stamps)

    def answer(self, opened: bytes | None) -> None:
        """See `Transfer.answer`."""
        super().answer(opened)
        if self.is_open:
            logger.info("target and draft wait for each other on the GPU: neither reply is waited for")
        elif self.offered is not None and not self.is_open:
            logger.warning(
                "target and draft wait for each other's replies: the target cannot open the board, see its log"
            )
