"""How the reference attention ops read and write paged caches: by slot, by sequence."""

from collections.abc import Iterator

import torch
from torch import Tensor

from kimi_kernels.argument_checks import require, require_dtype, require_shape
from kimi_kernels.attention_batch import AttentionBatch
from kimi_kernels.quantization.reference import FP8_MAX


def write_slots(slots: Tensor, slot_mapping: Tensor, rows: Tensor) -> None:
    """Write row t to `slots[slot_mapping[t]]`, in place; a negative slot writes nothing.

    Values beyond the range of a float8 cache become its largest finite one.

    Args:
        slots: [num_blocks * block_size, ...], the cache's storage.
        slot_mapping: [T] int64. rows: [T, ...].
    """
    require_shape("slot_mapping", slot_mapping, rows.shape[0])
    require_dtype("slot_mapping", slot_mapping, torch.int64)
    kept = slot_mapping >= 0
    if not kept.all():
        slot_mapping, rows = slot_mapping[kept], rows[kept]
    if slots.itemsize == 1:
        rows = rows.clamp(-FP8_MAX, FP8_MAX).to(slots.dtype).view(torch.uint8)
        slots = slots.view(torch.uint8)
    slots.index_copy_(0, slot_mapping, rows.to(slots.dtype))


def read_slots(blocks: Tensor, block_ids: Tensor, scale: float = 1.0) -> Tensor:
    """Gather whole blocks.

    Args:
        blocks: [num_blocks, block_size, ...]. block_ids: [n].
    Returns:
        [n * block_size, ...] float32, times `scale`.
    """
    if blocks.itemsize == 1:
        rows = blocks.view(torch.uint8).index_select(0, block_ids).view(blocks.dtype)
    else:
        rows = blocks.index_select(0, block_ids)
    rows = rows.flatten(0, 1).float()
    return rows if scale == 1.0 else rows * scale


def sequences_with_queries(batch: AttentionBatch, block_size: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield (sequence, first query row, query rows, length) of every sequence that has keys and queries.

    Raises:
        ValueError: the batch contradicts itself, or a block table is too short for its sequence.
    """
    starts, lengths = batch.cu_seqlens_q.tolist(), batch.seq_lens.tolist()
    num_seqs, capacity = len(lengths), batch.block_table.shape[1] * block_size
    require_shape("batch.cu_seqlens_q", batch.cu_seqlens_q, num_seqs + 1)
    require_shape("batch.block_table", batch.block_table, num_seqs, None)
    require(starts[-1] <= batch.num_tokens, "batch.cu_seqlens_q", f"{starts[-1]} rows", f"at most {batch.num_tokens}")
    for sequence, length in enumerate(lengths):
        first, num_rows = starts[sequence], starts[sequence + 1] - starts[sequence]
        if num_rows <= 0 or length <= 0:
            continue
        require(
            length <= capacity,
            f"batch.seq_lens[{sequence}]",
            length,
            f"at most {capacity}, what {batch.block_table.shape[1]} blocks of {block_size} hold",
        )
        yield sequence, first, num_rows, length
