"""Chunks cut into parts, attended by the decode kernel inside a CUDA graph, against the expanded form of the whole."""

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from kimi_backend.runners.graphs.buckets import Bucket, prompt_buckets, smallest_fitting
from kimi_backend.runners.graphs.chunk_parts import ChunkParts
from kimi_backend.runners.row_arrays import RowArrays
from kimi_backend.types.plan import RowPlan
from kimi_kernels.attention_batch import AttentionBatch
from kimi_kernels.kernel_set import KernelSet
from support.attention_cases import PagedCase, paged_case, random_contents
from support.row_errors import worst_row_error

pytestmark = pytest.mark.gpu

RANK, NOPE, ROPE, VALUE, PAGE = 512, 128, 64, 128, 64
SCALE = (NOPE + ROPE) ** -0.5
ERROR_LIMIT = 2e-2
"""The up-projected keys and values of the one form, queries and latents of the other, are rounded to bf16."""
NUM_SEQS = 20


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda").bfloat16()


@dataclass
class Attention:
    """A captured call over static lengths, and a pool of latents."""

    bucket: Bucket
    num_heads: int
    dtype: torch.dtype = torch.bfloat16
    num_columns: int = 96
    kernels: KernelSet = field(default_factory=KernelSet.triton)

    def __post_init__(self) -> None:
        parts, rows, heads = self.bucket.num_parts, self.bucket.num_rows, self.num_heads
        self.w_uk, self.w_uv = randn(heads, NOPE, RANK) / NOPE**0.5, randn(heads, RANK, VALUE) / RANK**0.5
        self.queries = randn(rows, heads, NOPE + ROPE)
        self.cache = torch.zeros(4096, PAGE, RANK + ROPE, dtype=torch.bfloat16, device="cuda").to(self.dtype)
        self.cu_seqlens = torch.zeros(parts + 1, dtype=torch.int32, device="cuda")
        self.seq_lens = torch.zeros(parts, dtype=torch.int32, device="cuda")
        self.table = torch.zeros(parts, self.num_columns, dtype=torch.int32, device="cuda")
        self.run()
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.out = self.run()

    def run(self) -> torch.Tensor:
        batch = AttentionBatch(
            cu_seqlens_q=self.cu_seqlens,
            seq_lens=self.seq_lens,
            block_table=self.table,
            num_tokens=self.bucket.num_rows,
            max_query_len=self.bucket.query_len,
            max_seq_len=self.num_columns * PAGE,
        )
        latent = torch.einsum("tnp,npl->tnl", self.queries[..., :NOPE], self.w_uk)
        q = torch.cat([latent, self.queries[..., NOPE:]], dim=2)
        return self.kernels.mla_values(q, self.cache, batch, self.w_uv, SCALE)

    def replay(self, case: PagedCase) -> None:
        """Fill in a case, NaN in every slot that no token owns, and run the graph."""
        contents = self.cache_of(case)
        self.cache.copy_(torch.full_like(self.cache, torch.nan))
        self.cache[: len(contents)] = contents
        table = case.batch.block_table.numpy()
        query_lens = np.diff(case.batch.cu_seqlens_q.numpy())
        rows = RowPlan(
            token_ids=np.zeros(query_lens.sum(), np.int32),
            query_lens=query_lens,
            seq_lens=case.batch.seq_lens.numpy(),
            block_table=table,
        )
        parts = ChunkParts.of(rows, RowArrays.of(rows, PAGE), self.bucket)
        count = len(parts.ends)
        self.cu_seqlens.fill_(int(query_lens.sum()))
        self.cu_seqlens[0] = 0
        self.cu_seqlens[1 : count + 1] = torch.from_numpy(parts.ends).cuda()
        self.seq_lens.zero_()
        self.seq_lens[:count] = torch.from_numpy(parts.seq_lens).cuda()
        self.table[:count, : table.shape[1]] = torch.from_numpy(table[parts.sequence]).cuda()
        self.graph.replay()

    def cache_of(self, case: PagedCase) -> torch.Tensor:
        contents = random_contents([len(slots) for slots in case.slots], RANK + ROPE)
        return case.cache(contents).bfloat16().cuda().to(self.dtype)

    def expanded(self, case: PagedCase) -> torch.Tensor:
        """The whole chunks in the expanded form, as an eager step takes them."""
        batch = case.batch
        on_gpu = AttentionBatch(
            cu_seqlens_q=batch.cu_seqlens_q.cuda(),
            seq_lens=batch.seq_lens.cuda(),
            block_table=batch.block_table.cuda(),
            num_tokens=batch.num_tokens,
            max_query_len=batch.max_query_len,
            max_seq_len=batch.max_seq_len,
        )
        queries = self.queries[: batch.num_tokens]
        return self.kernels.mla_prefill(queries, self.cache, self.w_uk, self.w_uv, on_gpu, SCALE)


CASES: list[tuple[list[int], list[int]]] = [
    ([1] * 16 + [230], [900, 64, 65, 1, 2000, 128, 129, 7, 300, 301, 302, 303, 304, 305, 4000, 63, 1230]),
    ([37, 3, 9, 1], [37, 1003, 2009, 64]),
    ([4, 1, 8, 200, 2], [4000, 3, 8, 200, 66]),
]


@pytest.mark.parametrize("num_heads", [8, 16, 64])
def test_parts_attend_as_whole_chunks(num_heads: int) -> None:
    bucket = smallest_fitting(prompt_buckets(NUM_SEQS, 256, num_heads), NUM_SEQS, 256, 256)
    assert bucket is not None
    attention = Attention(bucket, num_heads)
    for query_lens, seq_lens in CASES:
        case = paged_case(query_lens, seq_lens, PAGE)
        attention.replay(case)
        num_rows = sum(query_lens)
        assert worst_row_error(attention.out[:num_rows], attention.expanded(case)) < ERROR_LIMIT
        assert not attention.out[num_rows:].any()


def test_parts_of_a_whole_prompt_over_float8_latents() -> None:
    bucket = smallest_fitting(prompt_buckets(NUM_SEQS, 2048, 8), 1, 2048, 2048)
    assert bucket is not None
    attention = Attention(bucket, 8, torch.float8_e4m3fn)
    case = paged_case([2011], [2011], PAGE)
    attention.replay(case)
    assert worst_row_error(attention.out[:2011], attention.expanded(case)) < 2 * ERROR_LIMIT
    assert not attention.out[2011:].any()
