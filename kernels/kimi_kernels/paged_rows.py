"""How attention ops in torch read and write paged caches: by slot, by sequence."""

from collections.abc import Iterator

import torch
from torch import Tensor

from kimi_kernels.argument_checks import require_shape
from kimi_kernels.attention_batch import AttentionBatch
from kimi_kernels.quantization.reference import FP8_MAX


def has_padding(slot_mapping: Tensor) -> bool:
    """Tell whether a row writes nothing. Nothing is kept by tensor: static arrays are written again each step."""
    return min(slot_mapping.tolist(), default=0) < 0


def write_slots(slots: Tensor, slot_mapping: Tensor, rows: Tensor, scale: float = 1.0) -> None:
    """Write row t over `scale` to `slots[slot_mapping[t]]`, in place; a negative slot writes nothing.

    Values beyond the range of a float8 cache become its largest finite one.

    Args:
        slots: [num_blocks * block_size, ...], the cache's storage.
        slot_mapping: [T] int64. rows: [T, ...].
    """
    if has_padding(slot_mapping):
        kept = slot_mapping >= 0
        slot_mapping, rows = slot_mapping[kept], rows[kept]
    if scale != 1.0:
        rows = rows.float() / scale
    if slots.itemsize == 1:
        rows = rows.clamp(-FP8_MAX, FP8_MAX).to(slots.dtype).view(torch.uint8)
        slots = slots.view(torch.uint8)
    slots.index_copy_(0, slot_mapping, rows if rows.dtype == slots.dtype else rows.to(slots.dtype))


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
    require_shape("batch.cu_seqlens_q", batch.cu_seqlens_q, len(lengths) + 1)
    require_shape("batch.block_table", batch.block_table, len(lengths), None)
    capacity = batch.block_table.shape[1] * block_size
    if starts != sorted(starts) or starts[0] != 0 or starts[-1] > batch.num_tokens:
        raise ValueError(f"batch.cu_seqlens_q: got {starts}, expected to rise from 0 to at most {batch.num_tokens}")
    for sequence, length in enumerate(lengths):
        if not 0 <= length <= capacity:
            held = f"{batch.block_table.shape[1]} blocks of {block_size}"
            raise ValueError(f"batch.seq_lens[{sequence}]: got {length}, expected 0 to {capacity}, what {held} hold")
        first, num_rows = starts[sequence], starts[sequence + 1] - starts[sequence]
        if num_rows > 0 and length > 0:
            yield sequence, first, num_rows, length
