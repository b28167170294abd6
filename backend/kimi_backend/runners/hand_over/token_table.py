"""`TokenTable`: the device-side tokens of draft and target (layout: `kimi_kernels.token_table`)."""

import torch

from kimi_backend.parallel import TensorParallelGroup
from kimi_backend.runners.plan_checks import RunnerLimits
from kimi_backend.types.plan import PLACEHOLDER_TOKEN_ID
from kimi_kernels.sampling_inputs import STATUS_NOT_FINITE
from kimi_kernels.token_table import PROPOSALS, STATUS


class TokenTable:
    """A row for each sequence that may run, and one more that padding writes. In one process both runners hold the same
    table; in two, each writes its half of its own, and the other half is a copy of what the other process wrote."""

    def __init__(self, drawn: torch.Tensor, proposed: torch.Tensor, *, is_split: bool) -> None:
        """
        Args:
            drawn: [rows + 1, 1 + W] int32, the target's half.
            proposed: [rows + 1, 2 + k] int32, the draft's.
            is_split: whether one half is another process's.
        """
        self.drawn, self.proposed, self.is_split = drawn, proposed, is_split

    @classmethod
    def allocate(cls, limits: RunnerLimits, device: torch.device, *, is_split: bool = False) -> "TokenTable":
        """A table that says nothing yet."""
        rows, most = limits.max_num_seqs + 1, limits.max_speculative_tokens
        table = cls(
            torch.zeros((rows, 2 + most), dtype=torch.int32, device=device),
            torch.empty((rows, PROPOSALS + most), dtype=torch.int32, device=device),
            is_split=is_split,
        )
        clear_proposals(table.proposed)
        return table

    @property
    def padding_row(self) -> int:
        """The row that nobody reads."""
        return len(self.drawn) - 1


def clear_proposals(proposed: torch.Tensor) -> None:
    """Let a draft's half say of no step anything but that it failed."""
    proposed.fill_(PLACEHOLDER_TOKEN_ID)
    proposed[:, STATUS] = STATUS_NOT_FINITE


def share(half: torch.Tensor, group: TensorParallelGroup) -> None:
    """Let every rank have rank 0's half: the others know nothing of the other process."""
    if group.size > 1:
        half.copy_(group.all_reduce(half.clone() if group.rank == 0 else torch.zeros_like(half)))
