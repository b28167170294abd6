"""`AuxBuffer`: where a target leaves aux hidden states for its draft, at an address that never changes.

A CUDA graph writes to the addresses that it was captured with, and another process can open a buffer once only if it
stays where it is. One region holds one step; regions are taken in turn, so that a step may be written while the draft
still reads the one before.
"""

import torch

from kimi_backend.errors import InvalidRequestError
from kimi_backend.types.plan import AuxHandle


class AuxBuffer:
    """Regions of [rows, width], one for each step in flight."""

    def __init__(self, tensor: torch.Tensor) -> None:
        """tensor: [num_regions, rows, width], contiguous; this process's own, or another's, opened through IPC."""
        if tensor.ndim != 3 or not tensor.is_contiguous():
            raise ValueError(
                f"aux buffer of shape {list(tensor.shape)}: a contiguous [num_regions, rows, width] needed"
            )
        self.tensor = tensor
        self._next_region = 0

    @classmethod
    def allocate(cls, num_regions: int, rows: int, width: int, dtype: torch.dtype, device: torch.device) -> "AuxBuffer":
        """A zeroed buffer: rows that nobody wrote are finite.

        Args:
            num_regions: steps in flight.
            rows: most rows of a step.
            width: num_aux_hidden_states * hidden_size of the target.
        """
        return cls(torch.zeros((num_regions, rows, width), dtype=dtype, device=device))

    @property
    def num_regions(self) -> int:
        return self.tensor.shape[0]

    @property
    def rows(self) -> int:
        return self.tensor.shape[1]

    @property
    def width(self) -> int:
        return self.tensor.shape[2]

    def region(self, index: int) -> torch.Tensor:
        """[rows, width], a view."""
        return self.tensor[index]

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    @property
    def all_rows(self) -> torch.Tensor:
        """[num_regions * rows, width], a view: region r starts at row r * rows."""
        return self.tensor.view(-1, self.width)

    def take_region(self) -> int:
        """The region of the next step. What it held is overwritten: `num_regions` steps ago must be done with."""
        region = self._next_region
        self._next_region = (region + 1) % self.num_regions
        return region

    def resolve(self, handle: AuxHandle) -> torch.Tensor:
        """The rows of a handle: its region of this buffer.

        Raises:
            InvalidRequestError: it names no region of this buffer.
        """
        if handle.region is None or not 0 <= handle.region < self.num_regions:
            raise InvalidRequestError(f"plan aux.region: {handle.region} given, 0 to {self.num_regions - 1} allowed")
        return self.region(handle.region)
