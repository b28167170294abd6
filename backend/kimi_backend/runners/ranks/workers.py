"""The other ranks, as rank 0's runners know them."""

from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch

from kimi_backend.types.plan import DraftPlan, TargetPlan


class Workers(Protocol):
    """The other ranks of a group. Alone, and on every rank but 0, there are none."""

    @property
    def count(self) -> int:
        """The number of workers."""
        ...

    def run(self, plan: TargetPlan | DraftPlan, aux: torch.Tensor | None = None) -> AbstractContextManager[None]:
        """Let them launch a step that has passed every check, and launch it here inside the context. Ends this process
        if that fails: the others wait in a collective then, for a rank that does not come.

        Args:
            aux: [rows, width] for a draft step whose aux hidden states no rank has at hand.
        """
        ...

    def wait_before_next(self, semaphore: int, value: int) -> None:
        """Their streams wait too, before the next step: for a value of a semaphore that they have opened
        (`hand_over.semaphores`). Forgotten when they are asked something before that."""
        ...

    def ask(self, question: str, contents: list[bytes]) -> list[bytes]:
        """One answer of each, in the order of their ranks.

        Args:
            contents: what each is told beside the question.

        Raises:
            WorkerError: one of them could not do it; says which, and why.
        """
        ...

    def close(self) -> None:
        """End them. Idempotent."""
        ...


class NoWorkers:
    """`Workers` of a single-GPU runner."""

    count = 0

    def __init__(self) -> None:
        self._nothing = nullcontext()

    def run(self, plan: TargetPlan | DraftPlan, aux: torch.Tensor | None = None) -> AbstractContextManager[None]:
        """See `Workers.run`."""
        return self._nothing

    def wait_before_next(self, semaphore: int, value: int) -> None:
        """See `Workers.wait_before_next`."""

    def ask(self, question: str, contents: list[bytes]) -> list[bytes]:
        """See `Workers.ask`."""
        return []

    def close(self) -> None:
        """See `Workers.close`."""


NO_WORKERS = NoWorkers()
