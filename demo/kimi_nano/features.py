"""Batches for training drafts: windows of text and what the frozen target computes on them.

On a GPU the target runs over fresh windows every time. On a CPU its pass costs as much as a draft's, so there its
results are kept and used several times.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kimi_nano.dataset import Windows
from kimi_nano.target import NanoTarget

WINDOWS_A_PASS = 8
MAX_KEPT_WINDOWS = 4096
STEPS_A_PASS = 6
"""Batches that a CPU trains on between two passes of the target."""


@dataclass(frozen=True, slots=True)
class DraftBatch:
    """B windows of L tokens."""

    embedded: Tensor
    """[B, L, H] float32, by the target's table."""
    aux: dict[int, Tensor]
    """R(j) -> [B, L, H] float32."""
    normed: Tensor
    """[B, L, H] float32, for the target's head."""
    sharpness: Tensor
    """[B] float32, 1 / the temperature that each window was written at."""


class DraftBatches(Protocol):
    """The source of batches."""

    def next(self) -> DraftBatch: ...


@torch.no_grad()
def run_target(
    target: NanoTarget, tokens: Tensor, sharpness: Tensor, layers: Sequence[int], dtype: torch.dtype
) -> DraftBatch:
    """tokens: [B, L] int64. sharpness: [B] float32."""
    out = target(tokens, dtype, tuple(layers))
    assert out.aux is not None
    shape = (*tokens.shape, -1)
    chunks = out.aux.view(shape).chunk(len(layers), dim=-1)
    embedded = target.weight("model.embed_tokens.weight")[tokens]
    return DraftBatch(embedded, dict(zip(layers, chunks, strict=True)), out.normed.view(shape), sharpness)


@dataclass(frozen=True, slots=True)
class LiveBatches:
    """Runs the target over fresh windows of each source."""

    target: NanoTarget
    sources: Sequence[tuple[Windows, int]]
    """The windows' sources, and how many of each a batch has."""
    sharpness: Tensor
    """[B] float32, of a batch's windows in the order of `sources`."""
    length: int
    layers: Sequence[int]
    dtype: torch.dtype

    def next(self) -> DraftBatch:
        return self.run(self.tokens())

    def tokens(self) -> Tensor:
        """[B, L] int64, new windows."""
        return torch.cat([windows.batch(count, self.length) for windows, count in self.sources if count])

    def run(self, tokens: Tensor) -> DraftBatch:
        return run_target(self.target, tokens, self.sharpness, self.layers, self.dtype)


class KeptBatches:
    """Keeps what the target computed on past windows, in bf16, and picks from it; adds new windows now and then."""

    def __init__(self, live: LiveBatches, num_windows: int, seed: int) -> None:
        """
        Args:
            live: gives `WINDOWS_A_PASS` windows at a time.
            num_windows: of a batch.
        """
        self._live = live
        self._num_windows = num_windows
        self._generator = torch.Generator().manual_seed(seed)
        self._kept: list[DraftBatch] = []
        self._count = 0

    def next(self) -> DraftBatch:
        has_room = len(self._kept) * WINDOWS_A_PASS < MAX_KEPT_WINDOWS
        if len(self._kept) < 2 or (has_room and self._count % STEPS_A_PASS == 0):
            self._kept.append(_in_bf16(self._live.next()))
        self._count += 1
        total = len(self._kept) * WINDOWS_A_PASS
        chosen = torch.randint(0, total, (self._num_windows,), generator=self._generator).tolist()
        places = [(self._kept[i // WINDOWS_A_PASS], i % WINDOWS_A_PASS) for i in chosen]
        return DraftBatch(
            torch.stack([batch.embedded[i] for batch, i in places]).float(),
            {j: torch.stack([batch.aux[j][i] for batch, i in places]).float() for j in self._kept[0].aux},
            torch.stack([batch.normed[i] for batch, i in places]).float(),
            torch.stack([batch.sharpness[i] for batch, i in places]),
        )


def _in_bf16(batch: DraftBatch) -> DraftBatch:
    aux = {j: x.bfloat16() for j, x in batch.aux.items()}
    return DraftBatch(batch.embedded.bfloat16(), aux, batch.normed.bfloat16(), batch.sharpness)
