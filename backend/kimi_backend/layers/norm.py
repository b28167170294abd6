"""Root-mean-square norm (Zhang and Sennrich 2019, arXiv 1910.07467), with the bias that some drafts add to it.

| tensor | shape |
|---|---|
| weight | [width] |
| bias, only in some drafts | [width] |
"""

import torch

from kimi_backend.layers.residual import RankTerms, add_rms_norm
from kimi_backend.layers.weight_loader import WeightLoader


class RmsNorm:
    """x / rms(x) * weight + bias over the last dimension."""

    def __init__(self, loader: WeightLoader, name: str, width: int, eps: float) -> None:
        self.weight = loader.vector(f"{name}.weight", width)
        self.bias = loader.optional_vector(f"{name}.bias", width)
        self._kernels = loader.kernels
        self._group = loader.group
        self._eps = eps

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: [T, width] -> [T, width]."""
        normed = self._kernels.rms_norm(x, self.weight, self._eps)
        return normed if self.bias is None else normed + self.bias

    def add(self, terms: RankTerms, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """
        Args:
            terms: what a layer adds to `residual` [T, width].
        Returns:
            normed: [T, width], the norm of the sum.
            total: [T, width], the sum.
        """
        normed, total = add_rms_norm(terms, residual, self.weight, self._eps, self._kernels, self._group)
        return (normed if self.bias is None else normed + self.bias), total
