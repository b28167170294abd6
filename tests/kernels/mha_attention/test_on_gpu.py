"""Multi-head attention compiled, over bf16 and float8 caches at a draft's widths, against its formula on the CPU."""

import dataclasses

import pytest
import torch

from kimi_kernels.mha_attention import kernel, naive
from support.attention_cases import paged_case, random_contents
from support.row_errors import worst_row_error

pytestmark = pytest.mark.gpu
HEAD_DIM, KV_SCALE = 128, 0.25
SCALE = HEAD_DIM**-0.5
ERROR_LIMIT = 8e-3
"""norm(error) / norm(row): weights and result rounded to bf16, 2^-9 each, and their sums."""
CASES = {"decode": ([4, 0, 1, 1, 8], [700, 0, 64, 1, 3000]), "prompts": ([150, 3, 64], [160, 3, 129])}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(64, 64), (64, 8)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_attention(case: str, window: int | None, num_heads: int, num_kv_heads: int, dtype: torch.dtype) -> None:
    """A scale that is forgotten shows: it is a power of two, so it changes no other bit of a float8."""
    paged = paged_case(*CASES[case], 64, padding_rows=1)
    contents = random_contents([len(slots) for slots in paged.slots], 2, num_kv_heads, HEAD_DIM)
    cache = torch.stack([paged.cache([content[:, plane] for content in contents]) for plane in range(2)])
    q = torch.randn(paged.batch.num_tokens, num_heads, HEAD_DIM).to(torch.bfloat16)
    kv_scale = KV_SCALE if dtype.itemsize == 1 else 1.0
    held = (cache / kv_scale).to(dtype)
    batch = dataclasses.replace(
        paged.batch,
        cu_seqlens_q=paged.batch.cu_seqlens_q.cuda(),
        seq_lens=paged.batch.seq_lens.cuda(),
        block_table=paged.batch.block_table.cuda(),
    )
    out = kernel.mha_attention(q.cuda(), held.cuda(), batch, SCALE, window, kv_scale)
    expected = naive.mha_attention(q, held, paged.batch, SCALE, window, kv_scale)
    assert worst_row_error(out, expected) < ERROR_LIMIT


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_float8_cache_is_written_as_the_judge_writes_it(dtype: torch.dtype) -> None:
    """Rounded to the nearest, values past its range to the largest."""
    k, v = (torch.randn(2, 500, 8, HEAD_DIM) * torch.logspace(-3, 3, 500)[:, None, None]).to(dtype).unbind()
    slots = torch.randperm(512)[:500]
    slots[::7] = -1
    expected = torch.zeros(2, 8, 64, 8, HEAD_DIM).to(torch.float8_e4m3fn)
    out = expected.cuda()
    kernel.store_kv(k.cuda(), v.cuda(), out, slots.cuda(), KV_SCALE)
    naive.store_kv(k, v, expected, slots, KV_SCALE)
    assert torch.equal(out.cpu().view(torch.uint8), expected.view(torch.uint8))
