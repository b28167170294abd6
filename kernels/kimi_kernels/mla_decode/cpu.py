"""Absorbed MLA attention in float32: query rows side by side, each over its own keys in whole tiles.

A row's keys are padded to a multiple of KEY_TILE, whatever rows run beside it; what it may not see is masked, so it
weighs exactly 0. Rows of a sequence with the same number of tiles are the items of one batched product, so the shapes
that the BLAS sees depend on N, D and a row's own number of keys only. Shapes: N heads, D = L + R, n keys.
"""

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from kimi_kernels.attention_batch import AttentionBatch
from kimi_kernels.mla_decode import reference
from kimi_kernels.paged_rows import read_slots, sequences_with_queries
from kimi_kernels.row_products import aligned, keeps_rows_aligned
from kimi_kernels.row_tiles import ceil_to

KEY_TILE = 32
"""Keys of a tile: half of it is wasted on average."""
SCORES_AT_ONCE = 2**18
"""Scores of a batched product, at least one row's: more would leave a core's cache."""


@dataclass(frozen=True, slots=True)
class _Rows:
    """Query rows of one sequence with the same number of tiles."""

    first: int
    stop: int
    num_keys: int
    """Keys with padding."""
    mask: Tensor
    """[rows, 1, num_keys] float32, 0 where the row sees the key, else negative infinity."""


@dataclass(frozen=True, slots=True)
class _Sequence:
    """One sequence of a step that has keys and query rows."""

    block_ids: Tensor
    slots: slice | None
    """The cache rows of its tokens, where its blocks follow one another."""
    length: int
    num_seen: int
    """Keys that all of its rows see."""
    padding: Tensor
    """[keys that are missing from the last tile, D], zeros."""
    groups: tuple[_Rows, ...]


def mla_decode(
    q: Tensor,
    latent_cache: Tensor,
    batch: AttentionBatch,
    kv_lora_rank: int,
    softmax_scale: float,
    kv_scale: float = 1.0,
    return_lse: bool = False,
    row_keys: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """`signatures.MlaDecode`.

    Raises:
        ValueError: q and latent_cache differ in width, or the batch does not fit them.
    """
    num_tokens, num_heads, latent_dim = q.shape
    fits = latent_cache.shape[2:] == (latent_dim,) and num_tokens == batch.num_tokens and kv_lora_rank <= latent_dim
    is_aligned = keeps_rows_aligned(num_heads * latent_dim, num_heads * kv_lora_rank)
    if not fits or not is_aligned or q.dtype != torch.float32 or return_lse or row_keys is not None:
        return reference.mla_decode(q, latent_cache, batch, kv_lora_rank, softmax_scale, kv_scale, return_lse, row_keys)
    q = aligned(q)
    out = None
    for sequence in _sequences(batch.cu_seqlens_q, batch.seq_lens, batch.block_table, q.shape, latent_cache.shape[1]):
        latents = _padded_latents(latent_cache, sequence, kv_scale)
        for rows in sequence.groups:
            if rows.stop - rows.first == num_tokens:
                return _attend(q, latents, rows, kv_lora_rank, softmax_scale), None
            if out is None:
                out = torch.zeros(num_tokens, num_heads, kv_lora_rank)
            out[rows.first : rows.stop] = _attend(q[rows.first : rows.stop], latents, rows, kv_lora_rank, softmax_scale)
    return torch.zeros(num_tokens, num_heads, kv_lora_rank) if out is None else out, None


def _padded_latents(latent_cache: Tensor, sequence: _Sequence, kv_scale: float) -> Tensor:
    """The sequence's latents in whole tiles of float32."""
    if sequence.slots is not None and latent_cache.dtype == torch.float32 and kv_scale == 1.0:
        latents = latent_cache.flatten(0, 1)[sequence.slots]
    else:
        latents = read_slots(latent_cache, sequence.block_ids, kv_scale)[: sequence.length]
    # A copy: what lies in the cache behind the last may be no number, and 0 times that is none either.
    latents = torch.cat((latents, sequence.padding))
    if sequence.num_seen < sequence.length:
        # Nor may what a later row stored spoil the rows before it. That row is no number all the same: its query is.
        latents[sequence.num_seen : sequence.length].nan_to_num_(0.0, 0.0, 0.0)
    return latents


def _attend(q: Tensor, latents: Tensor, rows: _Rows, kv_lora_rank: int, softmax_scale: float) -> Tensor:
    """[rows, N, L] from q [rows, N, D]."""
    keys = latents[: rows.num_keys].expand(len(q), -1, -1)
    scores = torch.baddbmm(rows.mask, q, keys.transpose(1, 2), alpha=softmax_scale)
    return torch.bmm(scores.softmax(dim=-1), keys[:, :, :kv_lora_rank])


@lru_cache(maxsize=4)
def _sequences(
    cu_seqlens_q: Tensor, seq_lens: Tensor, block_table: Tensor, q_shape: torch.Size, block_size: int
) -> tuple[_Sequence, ...]:
    """Every sequence that has keys and queries. All layers of a step ask for the same, with the same tensors."""
    num_tokens, num_heads, latent_dim = q_shape
    batch = AttentionBatch(
        cu_seqlens_q=cu_seqlens_q,
        seq_lens=seq_lens,
        block_table=block_table,
        num_tokens=num_tokens,
        max_query_len=num_tokens,
        max_seq_len=0,
    )
    found = []
    for sequence, first, num_rows, length in sequences_with_queries(batch, block_size):
        block_ids = block_table[sequence, : -(-length // block_size)]
        ids = block_ids.tolist()
        start = ids[0] * block_size
        in_order = ids == list(range(ids[0], ids[0] + len(ids)))
        slots = slice(start, start + length) if in_order else None
        padding = torch.zeros(ceil_to(KEY_TILE, length) - length, latent_dim)
        num_seen = max(length - num_rows + 1, 0)
        groups = tuple(_groups(first, num_rows, length, num_heads))
        found.append(_Sequence(block_ids, slots, length, num_seen, padding, groups))
    return tuple(found)


def _groups(first: int, num_rows: int, length: int, num_heads: int) -> list[_Rows]:
    """The last num_rows of a sequence, in order; rows before its first key have none."""
    groups = []
    row, stop = first + max(num_rows - length, 0), first + num_rows
    while row < stop:
        num_visible = length - (stop - 1 - row)
        num_keys = ceil_to(KEY_TILE, num_visible)
        most = max(1, SCORES_AT_ONCE // (num_heads * num_keys))
        end = min(stop, row + num_keys - num_visible + 1, row + most)
        place = num_visible - (num_keys - KEY_TILE) - 1
        groups.append(_Rows(row, end, num_keys, _masks(num_keys)[place : place + end - row]))
        row = end
    return groups


@lru_cache(maxsize=8)
def _masks(num_keys: int) -> Tensor:
    """[KEY_TILE, 1, num_keys], of all rows with so many keys: the first sees one key of the last tile."""
    visible = torch.arange(num_keys - KEY_TILE + 1, num_keys + 1)[:, None, None]
    hidden = torch.arange(num_keys) >= visible
    return torch.zeros(hidden.shape).masked_fill_(hidden, float("-inf"))
