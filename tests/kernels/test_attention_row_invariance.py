"""Row invariance of attention: a row's result depends on its own query and its own keys, to the bit.

Not on the other rows of its sequence, on the other sequences, on which blocks hold its keys, or on what lies in the
slots and block-table entries that it does not own.
"""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from kimi_kernels import KernelSet
from support.attention_cases import PagedCase, paged_case, random_contents
from support.bit_equality import assert_same_bits, normals, pick_rows


@dataclass(frozen=True)
class AttentionOp:
    """An attention op as a function of queries, a paged cache and a batch."""

    run: Callable[[Tensor, Tensor, PagedCase], tuple[Tensor, ...]]
    query_width: tuple[int, ...]
    cache_width: tuple[int, ...]


def mla_decode_op(
    kernels: KernelSet, num_heads: int, kv_lora_rank: int, rope_dim: int, *, return_lse: bool = False
) -> AttentionOp:
    def run(q: Tensor, cache: Tensor, case: PagedCase) -> tuple[Tensor, ...]:
        out, lse = kernels.mla_decode(q, cache, case.batch, kv_lora_rank, 0.2, return_lse=return_lse)
        return (out,) if lse is None else (out, lse)

    latent_dim = kv_lora_rank + rope_dim
    return AttentionOp(run, (num_heads, latent_dim), (latent_dim,))


def mla_prefill_op(
    kernels: KernelSet, num_heads: int, nope_dim: int, kv_lora_rank: int, rope_dim: int, v_dim: int
) -> AttentionOp:
    w_uk, w_uv = normals(num_heads, nope_dim, kv_lora_rank), normals(num_heads, kv_lora_rank, v_dim)

    def run(q: Tensor, cache: Tensor, case: PagedCase) -> tuple[Tensor, ...]:
        return (kernels.mla_prefill(q, cache, w_uk, w_uv, case.batch, 0.2),)

    return AttentionOp(run, (num_heads, nope_dim + rope_dim), (kv_lora_rank + rope_dim,))


def mha_op(
    kernels: KernelSet, num_heads: int, num_kv_heads: int, head_dim: int, sliding_window: int | None
) -> AttentionOp:
    def run(q: Tensor, cache: Tensor, case: PagedCase) -> tuple[Tensor, ...]:
        kv_cache = cache.permute(2, 0, 1, 3, 4).contiguous()
        return (kernels.mha_attention(q, kv_cache, case.batch, 0.3, sliding_window),)

    return AttentionOp(run, (num_heads, head_dim), (2, num_kv_heads, head_dim))


def attention_ops(kernels: KernelSet) -> dict[str, AttentionOp]:
    return {
        "mla_decode": mla_decode_op(kernels, 4, 32, 16),
        "mla_decode 8 heads": mla_decode_op(kernels, 8, 64, 16),
        "mla_decode and the sum": mla_decode_op(kernels, 4, 32, 16, return_lse=True),
        "mla_decode 17 heads, odd widths": mla_decode_op(kernels, 17, 31, 6),
        "mla_prefill": mla_prefill_op(kernels, 4, 16, 32, 16, 16),
        "mla_prefill odd": mla_prefill_op(kernels, 3, 7, 31, 6, 5),
        "mha_attention": mha_op(kernels, 4, 2, 16, None),
        "mha_attention window": mha_op(kernels, 4, 4, 16, 20),
        "mha_attention window, odd": mha_op(kernels, 6, 2, 7, 33),
    }


ATTENTION_OPS = attention_ops(KernelSet.plain())
PLAIN_OPS = ["mla_decode", "mla_prefill", "mha_attention"]
QUERY_LENS = (1, 1, 4, 17, 1, 8, 0, 3, 20, 9)
SEQ_LENS = (1, 70, 63, 33, 200, 8, 40, 65, 130, 16)


@pytest.mark.parametrize("block_size", [8, 64])
@pytest.mark.parametrize("name", ATTENTION_OPS)
def test_attention_of_a_row_depends_on_its_own_keys_only(name: str, block_size: int) -> None:
    op = ATTENTION_OPS[name]
    case = paged_case(QUERY_LENS, SEQ_LENS, block_size)
    contents = random_contents(SEQ_LENS, *op.cache_width)
    q = normals(case.batch.num_tokens, *op.query_width)
    together = op.run(q, case.cache(contents), case)
    for row, sequence, num_keys in case.rows():
        alone_case = paged_case([1], [num_keys], block_size, seed=row)
        alone = op.run(q[row : row + 1], alone_case.cache([contents[sequence][:num_keys]]), alone_case)
        company = f"{name}: row {row} of sequence {sequence} over {num_keys} keys"
        assert_same_bits(alone, pick_rows(together, torch.tensor([row])), company)


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("name", PLAIN_OPS)
def test_two_threads_do_not_change_that(name: str) -> None:
    op, block_size, length = ATTENTION_OPS[name], 64, 700
    contents = random_contents([length], *op.cache_width)
    q = normals(4, *op.query_width)
    whole = paged_case([4], [length], block_size)
    expected = op.run(q, whole.cache(contents), whole)
    for row in range(4):
        stop = length - 3 + row
        alone = paged_case([1], [stop], block_size, seed=row)
        got = op.run(q[row : row + 1], alone.cache([contents[0][:stop]]), alone)
        assert_same_bits(got, pick_rows(expected, torch.tensor([row])), f"{name}: row {row}")


@pytest.mark.parametrize("name", ATTENTION_OPS)
def test_attention_does_not_depend_on_how_a_sequence_is_cut(name: str) -> None:
    op, block_size, length = ATTENTION_OPS[name], 16, 97
    contents = random_contents([length], *op.cache_width)
    q = normals(length, *op.query_width)
    whole = paged_case([length], [length], block_size)
    expected = op.run(q, whole.cache(contents), whole)
    for chunk in (1, 2, 3, 5, 8, 9, 64):
        for start in range(0, length, chunk):
            stop = min(start + chunk, length)
            part = paged_case([stop - start], [stop], block_size, seed=start)
            got = op.run(q[start:stop], part.cache([contents[0][:stop]]), part)
            assert_same_bits(got, pick_rows(expected, torch.arange(start, stop)), f"{name}: rows {start} to {stop}")


@pytest.mark.parametrize("name", PLAIN_OPS)
def test_a_key_that_is_no_number_stays_with_the_rows_that_see_it(name: str) -> None:
    op, length = ATTENTION_OPS[name], 70
    contents = random_contents([length], *op.cache_width)
    q = normals(8, *op.query_width)
    case = paged_case([8], [length])
    expected = op.run(q, case.cache(contents), case)
    for bad in (torch.nan, torch.inf):
        contents[0][-3:] = bad
        got = op.run(q, case.cache(contents), case)
        assert_same_bits(pick_rows(got, torch.arange(5)), pick_rows(expected, torch.arange(5)), name)
