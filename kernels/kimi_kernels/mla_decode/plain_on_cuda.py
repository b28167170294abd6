"""Absorbed MLA attention in torch on a GPU, where a launch takes longer than a row: many rows in one product.

A row's bits must not depend on the rows beside it. So the shape of a product follows from the row's own number of keys
alone: keys are padded to a multiple of KEYS, and as many rows go together as make ROWS_TIMES_KEYS, rows of padding
among them. Keys of padding are zero and get no weight, whatever the cache holds there.

Shapes: R rows of a product, C keys of each; N heads, D = L + R.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from kimi_kernels.attention_batch import AttentionBatch
from kimi_kernels.paged_rows import SeeingRows, read_slots
from kimi_kernels.row_tiles import ceil_to

KEYS = 256
ROWS_TIMES_KEYS = 1 << 18


@dataclass(frozen=True, slots=True)
class Product:
    """Query rows with the same number of keys after padding."""

    num_rows: int
    """Rows without padding."""
    rows: Tensor
    """[R] int64; rows of padding repeat the first one, and nothing reads what becomes of them."""
    block_ids: Tensor
    """[R, blocks of C keys] int64, 0 behind a row's last block."""
    is_key: Tensor
    """[R, C] bool."""


def products(batch: AttentionBatch, seeing: Iterable[SeeingRows], block_size: int) -> tuple[Product, ...]:
    """Group the rows of a step by their number of keys."""
    groups: dict[int, list[tuple[int, int, int]]] = {}
    for rows in seeing:
        for row, num_keys in enumerate(rows.num_keys, rows.first):
            groups.setdefault(ceil_to(KEYS, num_keys), []).append((row, rows.sequence, num_keys))
    found = []
    for capacity, group in groups.items():
        size = max(1, ROWS_TIMES_KEYS // capacity)
        for start in range(0, len(group), size):
            part = group[start : start + size]
            padded = part + part[:1] * (size - len(part))
            found.append(_product(batch.block_table, len(part), padded, capacity, block_size))
    return tuple(found)


def _product(
    block_table: Tensor, num_rows: int, padded: list[tuple[int, int, int]], capacity: int, block_size: int
) -> Product:
    rows, sequences, num_keys = torch.tensor(padded, device=block_table.device).unbind(1)
    is_key = torch.arange(capacity, device=block_table.device) < num_keys[:, None]
    # Entries past a sequence's last block may hold anything.
    has_keys = is_key[:, ::block_size]
    num_blocks = has_keys.shape[1]
    block_ids = block_table[sequences, :num_blocks].long()
    block_ids = pad(block_ids, (0, num_blocks - block_ids.shape[1])).masked_fill_(~has_keys, 0)
    return Product(num_rows, rows, block_ids, is_key)


def attend(
    q: Tensor, latent_cache: Tensor, product: Product, scale: float, kv_scale: float, out: Tensor, lse: Tensor | None
) -> None:
    """Write the rows of a product.

    Args:
        q: [T, N, D] float32, D padded or not. out: [T, N, L] float32. lse: [T, N] float32, or None.
    """
    num_rows, capacity = product.is_key.shape
    latents = read_slots(latent_cache, product.block_ids.flatten(), kv_scale).view(num_rows, -1, latent_cache.shape[2])
    latents = latents[:, :capacity].masked_fill(~product.is_key[:, :, None], 0.0)
    latents = pad(latents, (0, q.shape[2] - latents.shape[2])).contiguous()
    scores = torch.bmm(q[product.rows] * scale, latents.transpose(1, 2))
    scores = scores.masked_fill_(~product.is_key[:, None], -torch.inf)
    found = torch.bmm(scores.softmax(dim=-1, dtype=torch.float64).float(), latents[:, :, : out.shape[2]])
    kept = product.rows[: product.num_rows]
    out[kept] = found[: product.num_rows]
    if lse is not None:
        lse[kept] = scores[: product.num_rows].double().logsumexp(dim=-1).float()
