"""Aux hidden states go from the target's process to the draft's: in a shared GPU buffer, or a tensor a step.

A GPU tensor costs about 0.7 ms on its way through the server, so where both runners share a GPU the draft opens the
target's buffer once and a step names a region of it. The engine's process decides step by step: it knows what the
target offered last and what the draft has opened. The draft's shared semaphores, which the target opens, likewise.
"""

import logging
from collections.abc import Callable

from kimi_backend.errors import ModelUnavailableError

logger = logging.getLogger("kimi_backend.serving")


class Transfer:
    """Memory of one runner's that the other is to open, as the engine's process knows of it."""

    def __init__(self) -> None:
        self._offered: bytes | None = None
        self._tried: bytes | None = None
        self._opened: bytes | None = None
        self.opener: Callable[[bytes], bytes | None] | None = None
        """Lets the other runner open a handle; returns what it has opened."""

    @property
    def is_open(self) -> bool:
        """True if the other has opened what its owner offers now."""
        return self._offered is not None and self._opened == self._offered

    def open(self) -> None:
        """Let the other runner open what is offered, if it has not been asked to yet."""
        if self._offered is None or self._tried == self._offered or self.opener is None:
            return
        try:
            opened = self.opener(self._offered)
        except ModelUnavailableError as error:
            logger.warning("what a runner shares is not opened: %s", error)
            opened = None
        self.answer(opened)

    def forget(self) -> None:
        """The other may be another process by now: nothing is open until it has been asked."""
        self._tried = self._opened = None

    @property
    def offered(self) -> bytes | None:
        """The owner's handle."""
        return self._offered

    def offer(self, handle: bytes | None) -> None:
        """The owner described itself: its handle, None where it shares none."""
        self._offered = handle

    def answer(self, opened: bytes | None) -> None:
        """The other was given the offered handle: what it has opened."""
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


class SemaphoreTransfer(Transfer):
    """The draft's shared semaphores: when the target has opened them, the steps of both wait for each other on the
    GPU."""

    def answer(self, opened: bytes | None) -> None:
        """See `Transfer.answer`."""
        super().answer(opened)
        if self.is_open:
            logger.info("target and draft wait for each other on the GPU: neither reply is waited for")
        elif self.offered is not None:
            logger.warning(
                "target and draft wait for each other's replies: the target cannot open the semaphores, see its log"
            )
