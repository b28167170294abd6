"""The reference's attention on a CPU: one query row at a time over exactly its own keys.

Shapes: T query rows, NP padded heads, D = L + R, N heads.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from kimi_kernels.argument_checks import require_dtype, require_shape
from kimi_kernels.attention_batch import AttentionBatch
from kimi_kernels.paged_rows import read_slots, sequences_with_queries


def attend_rows(
    q: Tensor,
    latent_cache: Tensor,
    batch: AttentionBatch,
    kv_scale: float,
    out: Tensor,
    lse: Tensor | None,
    row_keys: Tensor | None = None,
) -> None:
    """Write the rows that have keys; the others are left as they are.

    Args:
        q: [T, NP, D] float32, scaled, zero in padded heads. latent_cache: [num_blocks, block_size, D].
        out: [T, NP, L] float32. lse: [T, N] float32, natural log; None if not wanted. row_keys: [T] int32 or None.
    """
    block_size = latent_cache.shape[1]
    q_rows, out_rows = q.unbind(), out.unbind()
    for sequence, length, rows in sequences_with_rows(batch, block_size, row_keys):
        block_ids = batch.block_table[sequence, : -(-length // block_size)]
        latents = read_slots(latent_cache, block_ids, kv_scale)
        keys_t, values = latents.t(), latents[:, : out.shape[2]]
        for row, num_keys in rows:
            scores = torch.mm(q_rows[row], keys_t[:, :num_keys])
            probs = scores.softmax(dim=-1, dtype=torch.float64).float()
            torch.mm(probs, values[:num_keys], out=out_rows[row])
            if lse is not None:
                lse[row] = log_sum_exp(scores[: lse.shape[1]])


def sequences_with_rows(
    batch: AttentionBatch, block_size: int, row_keys: Tensor | None
) -> Iterator[tuple[int, int, list[tuple[int, int]]]]:
    """Yield (sequence, length, [(query row, number of keys it sees)]), without rows that see none.

    Raises:
        ValueError: as `sequences_with_queries`, or `row_keys` fall within a sequence, or exceed its length.
    """
    seen = None
    if row_keys is not None:
        require_shape("row_keys", row_keys, batch.num_tokens)
        require_dtype("row_keys", row_keys, torch.int32)
        seen = row_keys.tolist()
    for sequence, first, num_rows, length in sequences_with_queries(batch, block_size):
        counts = seen[first : first + num_rows] if seen else range(length - num_rows + 1, length + 1)
        if seen and (counts != sorted(counts) or counts[0] < 0 or counts[-1] > length):
            raise ValueError(
                f"row_keys of sequence {sequence}: got {counts}, expected to rise from 0 to at most {length}"
            )
        yield sequence, length, [(first + row, count) for row, count in enumerate(counts) if count > 0]


def log_sum_exp(scores: Tensor) -> Tensor:
    """[N, n] -> [N], natural log of the sum of exponentials, in float64."""
    wide = scores.double()
    largest = wide.amax(dim=-1)
    return largest + (wide - largest.unsqueeze(-1)).exp().sum(dim=-1).log()
