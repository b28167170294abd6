"""The reference's attention on a GPU: many query rows in one product, each over its own keys padded to a fixed number.

A row's bits must not depend on the rows beside it. So the shape of a product follows from the row's own number of keys
alone: keys are padded to a multiple of KEYS, and as many rows go together as make ROWS_TIMES_KEYS, rows of padding
among them. Keys of padding are zero and get no weight, whatever the cache holds there.

Shapes: T query rows, NP padded heads, D = L + R, N heads; R rows of a product, C keys of each.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from kimi_kernels.attention_batch import AttentionBatch
from kimi_kernels.mla_decode.reference_rows import log_sum_exp, sequences_with_rows
from kimi_kernels.paged_rows import read_slots
from kimi_kernels.row_tiles import ceil_to

KEYS = 256
ROWS_TIMES_KEYS = 1 << 18


def attend_batched(
    q: Tensor,
    latent_cache: Tensor,
    batch: AttentionBatch,
    kv_scale: float,
    out: Tensor,
    lse: Tensor | None,
    row_keys: Tensor | None = None,
) -> None:
    """`reference_rows.attend_rows`, with other last bits."""
    for capacity, rows, sequences, num_keys in _groups(batch, latent_cache.shape[1], row_keys):
        size = max(1, ROWS_TIMES_KEYS // capacity)
        for start in range(0, len(rows), size):
            part = slice(start, start + size)
            count = len(rows[part])
            padding = [0] * (size - count)
            # Rows of padding repeat the group's first one; nothing reads what becomes of them.
            row, sequence, keys = torch.tensor(
                [of_row[part] + [of_row[0] for _ in padding] for of_row in (rows, sequences, num_keys)],
                device=q.device,
            )
            is_key = torch.arange(capacity, device=q.device) < keys[:, None]
            latents = _gather(latent_cache, batch.block_table[sequence], is_key, kv_scale)
            scores = torch.bmm(q[row], latents.transpose(1, 2)).masked_fill_(~is_key[:, None], -torch.inf)
            probs = scores.softmax(dim=-1, dtype=torch.float64).float()
            found = torch.bmm(probs, latents[:, :, : out.shape[2]])
            out[row[:count]] = found[:count]
            if lse is not None:
                lse[row[:count]] = log_sum_exp(scores[:count, : lse.shape[1]]).float()


def _groups(
    batch: AttentionBatch, block_size: int, row_keys: Tensor | None
) -> Iterator[tuple[int, list[int], list[int], list[int]]]:
    """(padded number of keys, rows, their sequences, their numbers of keys) of the rows that have keys."""
    groups: dict[int, tuple[list[int], list[int], list[int]]] = {}
    for sequence, _, rows in sequences_with_rows(batch, block_size, row_keys):
        for row, num_keys in rows:
            group = groups.setdefault(ceil_to(KEYS, num_keys), ([], [], []))
            for values, value in zip(group, (row, sequence, num_keys), strict=True):
                values.append(value)
    for capacity, group in groups.items():
        yield capacity, *group


def _gather(latent_cache: Tensor, block_tables: Tensor, is_key: Tensor, kv_scale: float) -> Tensor:
    """[R, C, D] float32, 0 where is_key [R, C] is false."""
    block_size, latent_dim = latent_cache.shape[1:]
    num_rows, capacity = is_key.shape
    num_blocks = -(-capacity // block_size)
    has_keys = is_key[:, ::block_size]
    table = torch.zeros(num_rows, num_blocks, dtype=torch.int64, device=latent_cache.device)
    width = min(num_blocks, block_tables.shape[1])
    table[:, :width] = block_tables[:, :width]
    # Entries past a sequence's last block may hold anything.
    table.masked_fill_(~has_keys, 0)
    latents = read_slots(latent_cache, table.flatten(), kv_scale).view(num_rows, -1, latent_dim)[:, :capacity]
    return latents.masked_fill(~is_key[:, :, None], 0.0).contiguous()
