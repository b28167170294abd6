"""How aux hidden states get from the target's process to the draft's: a shared GPU buffer, or a tensor a step.

A GPU tensor costs about 0.7 ms on its way through the server, so where both runners share a GPU the draft opens the
target's buffer once and a step names a region of it. The engine's process decides step by step: it knows what the
target offered last and what the draft has opened.
"""

import logging

logger = logging.getLogger("kimi_backend.serving")


class AuxTransfer:
    """What the engine's two runner proxies know together."""

    def __init__(self) -> None:
        self._offered: bytes | None = None
        self._tried: bytes | None = None
        self._opened: bytes | None = None

    @property
    def is_open(self) -> bool:
        """Whether the draft reads the buffer that the target writes: no tensor need travel."""
        return self._offered is not None and self._opened == self._offered

    @property
    def to_open(self) -> bytes | None:
        """The handle that the draft has to open, when it has not been asked to yet."""
        return self._offered if self._tried != self._offered else None

    @property
    def offered(self) -> bytes | None:
        """The target's handle."""
        return self._offered

    def offer(self, handle: bytes | None) -> None:
        """The target described itself: its buffer's handle, None where it shares none."""
        if handle is None:
            logger.info("aux hidden states travel as tensors: the target shares no buffer")
        self._offered = handle

    def answer(self, opened: bytes | None) -> None:
        """The draft described itself, having been given the offered handle: what it has opened."""
        self._tried, self._opened = self._offered, opened
        if self.is_open:
            logger.info("aux hidden states stay on the GPU: the draft reads the target's buffer")
        elif self._offered is not None:
            logger.warning("aux hidden states travel as tensors: the draft cannot open the buffer, see its log")
