"""Absorbed MLA attention in torch: query rows side by side, each over its own keys in whole tiles.

A row's keys are padded to a multiple of KEY_TILE, whatever rows run beside it; what it may not see is masked, so it
weighs exactly 0. Rows of a sequence with the same number of tiles are the items of one batched product, so the shapes
that the BLAS sees depend on N, D and a row's own number of keys only. On a GPU, `plain_on_cuda`.

Shapes: N heads, D = L + R.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.functional import pad

from kimi_kernels.argument_checks import refuse
from kimi_kernels.attention_batch import AttentionBatch, DecodePlan
from kimi_kernels.mla_decode import plain_on_cuda
from kimi_kernels.mla_decode.op import check_decode
from kimi_kernels.paged_rows import SeeingRows, read_slots, seeing_rows
from kimi_kernels.row_products import aligned, keeps_rows_aligned
from kimi_kernels.row_tiles import ceil_to, ceil_to_width

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
    """One sequence of a step, with rows that see keys."""

    block_ids: Tensor
    slots: slice | None
    """The cache rows of its keys, where its blocks follow one another."""
    num_keys: int
    """Keys that its last row sees."""
    num_shared: int
    """Keys that all of its rows see."""
    groups: tuple[_Rows, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainDecodePlan(DecodePlan):
    """The sequences of a step; on a GPU the products that its rows share."""

    block_size: int
    sequences: tuple[_Sequence, ...] = ()
    products: tuple[plain_on_cuda.Product, ...] = ()


def plan_mla_decode(batch: AttentionBatch, num_heads: int, block_size: int, split_tokens: int = 0) -> PlainDecodePlan:
    """`PlanMlaDecode`. No row's keys are cut, so `split_tokens` changes nothing.

    Raises:
        ValueError: the batch contradicts itself, or a block table is too short for its sequence.
    """
    return _plan(batch, num_heads, block_size, None)


def _plan(batch: AttentionBatch, num_heads: int, block_size: int, row_keys: Tensor | None) -> PlainDecodePlan:
    rows = seeing_rows(batch, block_size, row_keys)
    if batch.seq_lens.is_cuda:
        return PlainDecodePlan(block_size=block_size, products=plain_on_cuda.products(batch, rows, block_size))
    sequences = tuple(_sequence(batch.block_table, one, num_heads, block_size) for one in rows)
    return PlainDecodePlan(block_size=block_size, sequences=sequences)


def _sequence(block_table: Tensor, rows: SeeingRows, num_heads: int, block_size: int) -> _Sequence:
    num_shared, num_keys = rows.num_keys[0], rows.num_keys[-1]
    block_ids = block_table[rows.sequence, : -(-num_keys // block_size)]
    ids = block_ids.tolist()
    start = ids[0] * block_size
    slots = slice(start, start + num_keys) if ids == list(range(ids[0], ids[0] + len(ids))) else None
    return _Sequence(block_ids, slots, num_keys, num_shared, tuple(_groups(rows.first, rows.num_keys, num_heads)))


def _groups(first: int, num_keys: Sequence[int], num_heads: int) -> Iterator[_Rows]:
    start = 0
    while start < len(num_keys):
        padded = ceil_to(KEY_TILE, num_keys[start])
        most = max(1, SCORES_AT_ONCE // (num_heads * padded))
        stop = min(start + most, bisect_right(num_keys, padded))
        places = [number - (padded - KEY_TILE) - 1 for number in num_keys[start:stop]]
        yield _Rows(first + start, first + stop, padded, _masks(padded)[places])
        start = stop


@lru_cache(maxsize=8)
def _masks(num_keys: int) -> Tensor:
    """[KEY_TILE, 1, num_keys], of all rows with so many keys: the first sees one key of the last tile."""
    visible = torch.arange(num_keys - KEY_TILE + 1, num_keys + 1)[:, None, None]
    hidden = torch.arange(num_keys) >= visible
    return torch.zeros(hidden.shape).masked_fill_(hidden, float("-inf"))


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
    """`MlaDecode`."""
    check_decode(q, latent_cache, batch, kv_lora_rank, softmax_scale, kv_scale, row_keys)
    num_tokens, num_heads, latent_dim = q.shape
    block_size = latent_cache.shape[1]
    plan = batch.decode_plan
    if plan is None or row_keys is not None:
        plan = _plan(batch, num_heads, block_size, row_keys)
    if not isinstance(plan, PlainDecodePlan) or plan.block_size != block_size:
        got = f"a {type(plan).__name__}"
        refuse("batch.decode_plan", got, f"one that this kernel set made for blocks of {block_size}")
    rows, width = q, kv_lora_rank
    if rows.dtype != torch.float32:
        rows = rows.float()
    if not keeps_rows_aligned(num_heads * latent_dim, num_heads * width):
        rows, width = pad(rows, (0, ceil_to_width(latent_dim) - latent_dim)), ceil_to_width(width)
    lse = torch.full((num_tokens, num_heads), -torch.inf, device=q.device) if return_lse else None
    if plan.products:
        out = torch.zeros(num_tokens, num_heads, width, device=q.device)
        for product in plan.products:
            plain_on_cuda.attend(rows, latent_cache, product, softmax_scale, kv_scale, out, lse)
    else:
        out = _attend(aligned(rows), latent_cache, plan.sequences, width, softmax_scale, kv_scale, lse)
    if width != kv_lora_rank:
        out = out[:, :, :kv_lora_rank].contiguous()
    return out if out.dtype == q.dtype else out.to(q.dtype), lse


def _attend(
    q: Tensor,
    latent_cache: Tensor,
    sequences: tuple[_Sequence, ...],
    width: int,
    softmax_scale: float,
    kv_scale: float,
    lse: Tensor | None,
) -> Tensor:
    """[T, N, width] of q [T, N, D], D padded or not."""
    out = None
    for sequence in sequences:
        latents = _padded_latents(latent_cache, sequence, q.shape[2], kv_scale)
        for rows in sequence.groups:
            part, num_rows = slice(rows.first, rows.stop), rows.stop - rows.first
            is_all = num_rows == len(q)
            keys = latents[: rows.num_keys].expand(num_rows, -1, -1)
            queries = q if is_all else q[part]
            scores = torch.baddbmm(rows.mask, queries, keys.transpose(1, 2), alpha=softmax_scale)
            if lse is not None:
                lse[part] = scores.double().logsumexp(dim=-1).float()
            found = torch.bmm(scores.softmax(dim=-1), keys[:, :, :width])
            if is_all:
                return found
            if out is None:
                out = torch.zeros(len(q), q.shape[1], width)
            out[part] = found
    return torch.zeros(len(q), q.shape[1], width, device=q.device) if out is None else out


def _padded_latents(latent_cache: Tensor, sequence: _Sequence, width: int, kv_scale: float) -> Tensor:
    """The latents that a sequence's rows see, in whole tiles of float32."""
    num_keys, latent_dim = sequence.num_keys, latent_cache.shape[2]
    if sequence.slots is not None and latent_cache.dtype == torch.float32 and kv_scale == 1.0:
        latents = latent_cache.flatten(0, 1)[sequence.slots]
    else:
        latents = read_slots(latent_cache, sequence.block_ids, kv_scale)[:num_keys]
    # A copy: what lies in the cache behind the last may be no number, and 0 times that is none either.
    latents = torch.cat((latents, _zeros(ceil_to(KEY_TILE, num_keys) - num_keys, latent_dim)))
    if width != latent_dim:
        latents = pad(latents, (0, width - latent_dim))
    if sequence.num_shared < num_keys:
        # Nor may what a later row stored spoil the rows before it. That row is no number all the same: its query is.
        latents[sequence.num_shared : num_keys].nan_to_num_(0.0, 0.0, 0.0)
    return latents


@lru_cache(maxsize=2 * KEY_TILE)
def _zeros(num_rows: int, width: int) -> Tensor:
    """Zeros that are kept: putting two tensors together takes half as long as padding one."""
    return torch.zeros(num_rows, width)
