"""What rank 0's runners know of the other ranks."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch

from kimi_backend.parallel import TensorParallelGroup
from kimi_backend.types.plan import DraftPlan, TargetPlan


class Peers(Protocol):
    """The other ranks of a group. Alone, and on every rank but 0, there are none."""

    @property
    def count(self) -> int:
        """How many they are."""
        ...

    @property
    def have_both(self) -> bool:
        """Whether each of them has both models, and so what one leaves on its device for the other."""
        ...

    def run(
        self,
        method: str,
        plan: TargetPlan | DraftPlan,
        aux: torch.Tensor | None = None,
        shared: Sequence[torch.Tensor] = (),
    ) -> AbstractContextManager[None]:
        """Let them run a step that has passed every check, and run it here inside the context. Ends this process if
        that fails: the others wait in a collective then, for a rank that does not come.

        Args:
            method: of the runner, as `messages.Method` names it.
            aux: [rows, width] for a draft step whose aux hidden states no rank has at hand.
            shared: what only this rank's device has. They get it in sums (`share`), which is to be called inside.
        """
        ...

    def wait_before_next(self, offset: int, value: int) -> None:
        """Their streams wait too, before the next step: for a number of the board that they have opened
        (`board_words`). Forgotten when they are asked something before that."""
        ...

    def ask(self, question: str, contents: list[bytes]) -> list[bytes]:
        """One answer of each, in the order of their ranks.

        Args:
            contents: what each is told beside the question.

        Raises:
            PeerError: one of them could not do it; says which, and why.
        """
        ...

    def close(self) -> None:
        """End them. Idempotent."""
        ...


class NoPeers:
    """Of a runner that nobody follows."""

    count = 0
    have_both = True

    def __init__(self) -> None:
        self._nothing = nullcontext()

    def run(
        self,
        method: str,
        plan: TargetPlan | DraftPlan,
        aux: torch.Tensor | None = None,
        shared: Sequence[torch.Tensor] = (),
    ) -> AbstractContextManager[None]:
        """See `Peers.run`."""
        return self._nothing

    def wait_before_next(self, offset: int, value: int) -> None:
        """See `Peers.wait_before_next`."""

    def ask(self, question: str, contents: list[bytes]) -> list[bytes]:
        """See `Peers.ask`."""
        return []

    def close(self) -> None:
        """See `Peers.close`."""


NO_PEERS = NoPeers()


def share(group: TensorParallelGroup, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Rank 0's tensors on every rank: the others call this with zeros of the same shapes."""
    return [group.all_reduce(tensor.clone()) for tensor in tensors]
