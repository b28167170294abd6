"""Reads and writes of paged caches in torch: by slot, by block, by the rows of sequences."""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kimi_kernels.argument_checks import refuse, require_shape
from kimi_kernels.attention_batch import AttentionBatch, check_block_table
from kimi_kernels.quantization.plain import FP8_MAX


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


@dataclass(frozen=True, slots=True)
class SeeingRows:
    """Query rows of one sequence, one after another, that see keys."""

    sequence: int
    first: int
    num_keys: Sequence[int]
    """The keys that each sees, by number: rising, or staying."""


def seeing_rows(batch: AttentionBatch, block_size: int, row_keys: Tensor | None = None) -> Iterator[SeeingRows]:
    """Yield the rows of every sequence that see keys: as many as the batch says, or `row_keys` [T].

    Raises:
        ValueError: the batch contradicts itself, a block table is too short for its sequence, or `row_keys` fall within
            a sequence or exceed its length.
    """
    starts, lengths = batch.cu_seqlens_q.tolist(), batch.seq_lens.tolist()
    require_shape("batch.cu_seqlens_q", batch.cu_seqlens_q, len(lengths) + 1)
    check_block_table(batch)
    capacity = batch.block_table.shape[1] * block_size
    if starts != sorted(starts) or starts[0] != 0 or starts[-1] > batch.num_tokens:
        refuse("batch.cu_seqlens_q", starts, f"to rise from 0 to at most {batch.num_tokens}")
    told = None if row_keys is None else row_keys.tolist()
    for sequence, length in enumerate(lengths):
        if not 0 <= length <= capacity:
            held = f"{batch.block_table.shape[1]} blocks of {block_size}"
            refuse(f"batch.seq_lens[{sequence}]", length, f"0 to {capacity}, what {held} hold")
        first, stop = starts[sequence], starts[sequence + 1]
        num_keys: Sequence[int] = range(length - (stop - first) + 1, length + 1)
        if told is not None:
            num_keys = told[first:stop]
            if num_keys != sorted(num_keys) or not all(0 <= number <= length for number in num_keys):
                refuse(f"row_keys of sequence {sequence}", num_keys, f"to rise from 0 to at most {length}")
        num_blind = bisect_right(num_keys, 0)
        if num_blind < len(num_keys):
            yield SeeingRows(sequence, first + num_blind, num_keys[num_blind:])
