"""A model's paged KV, as one tensor on the device."""

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class KvPool:
    """The tensor that blocks index. Which block belongs to whom is the engine's business."""

    tensor: torch.Tensor
    """Target: [num_layers, num_blocks, block_size, latent_dim]; MLA draft: the same with one layer; MHA draft:
    [2, num_blocks, block_size, num_kv_heads, head_dim]."""
    scale: float = 1.0
    """A float8 pool holds value / scale."""

    @classmethod
    def allocate(
        cls,
        shape: Callable[[int, int], tuple[int, ...]],
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        scale: float = 1.0,
    ) -> "KvPool":
        """A zeroed pool: what nobody wrote is finite.

        Args:
            shape: the model's `kv_pool_shape`.
        """
        return cls(tensor=torch.zeros(shape(num_blocks, block_size), dtype=dtype, device=device), scale=scale)

    @property
    def num_blocks(self) -> int:
        return self.tensor.shape[1]

    @property
    def block_size(self) -> int:
        return self.tensor.shape[2]

    @property
    def num_bytes(self) -> int:
        return self.tensor.numel() * self.tensor.element_size()

    @property
    def dtype_name(self) -> str:
        """torch's name of the element type, such as "bfloat16"."""
        return str(self.tensor.dtype).removeprefix("torch.")
