"""What a frozen target computes on windows of text, kept: for training drafts many times over the same windows.

On a CPU the target's pass costs as much as a draft's, so running it once for several passes of the draft pays.
"""

import torch
from torch import Tensor

from kimi_nano.dataset import Windows
from kimi_nano.target import NanoTarget

WINDOWS_A_PASS = 8


class Features:
    """Tokens, R(j) and final normed states of windows, in bf16."""

    def __init__(self, target: NanoTarget, aux_layer_ids: tuple[int, ...], length: int, dtype: torch.dtype) -> None:
        self._target = target
        self._ids = aux_layer_ids
        self._length = length
        self._dtype = dtype
        self._parts: list[tuple[Tensor, Tensor, Tensor]] = []

    @property
    def num_windows(self) -> int:
        return len(self._parts) * WINDOWS_A_PASS

    @torch.no_grad()
    def add(self, windows: Windows) -> None:
        """Run the target over a few more windows."""
        tokens = windows.batch(WINDOWS_A_PASS, self._length)
        out = self._target.eager(tokens, self._dtype, self._ids)
        assert out.aux is not None
        aux = out.aux.bfloat16().view(*tokens.shape, -1)
        self._parts.append((tokens, aux, out.normed.bfloat16().view(*tokens.shape, -1)))

    def batch(self, num_windows: int, generator: torch.Generator) -> tuple[Tensor, dict[int, Tensor], Tensor]:
        """tokens [B, L], R(j) -> [B, L, H], normed [B, L, H] float32."""
        chosen = torch.randint(0, self.num_windows, (num_windows,), generator=generator).tolist()
        picked = [[x[i % WINDOWS_A_PASS] for x in self._parts[i // WINDOWS_A_PASS]] for i in chosen]
        tokens, aux, normed = (torch.stack(parts) for parts in zip(*picked, strict=True))
        chunks = aux.float().chunk(len(self._ids), dim=-1)
        return tokens, dict(zip(self._ids, chunks, strict=True)), normed.float()
