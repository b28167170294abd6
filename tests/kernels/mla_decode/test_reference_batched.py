"""The reference's attention of many rows in one product against the one of a row at a time, and a row's bits."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kimi_kernels import AttentionBatch
from kimi_kernels.mla_decode import reference_batched
from kimi_kernels.mla_decode.reference_batched import attend_batched
from kimi_kernels.mla_decode.reference_rows import attend_rows
from support.attention_cases import paged_case, random_contents

HEADS, RANK, DIM = 16, 8, 12
TOLERANCE = 1e-5

Attend = Callable[[Tensor, Tensor, AttentionBatch, float, Tensor, Tensor | None], None]


@pytest.fixture(autouse=True)
def small_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several numbers of keys, and several products of each."""
    monkeypatch.setattr(reference_batched, "KEYS", 32)
    monkeypatch.setattr(reference_batched, "ROWS_TIMES_KEYS", 128)


def run(attend: Attend, q: Tensor, cache: Tensor, batch: AttentionBatch) -> tuple[Tensor, Tensor]:
    out, lse = torch.zeros(len(q), HEADS, RANK), torch.full((len(q), HEADS - 3), -torch.inf)
    attend(q, cache, batch, 0.5, out, lse)
    return out, lse


@pytest.mark.parametrize("block_size", [16, 64])
def test_many_rows_at_once_are_rows_one_by_one(block_size: int) -> None:
    seq_lens = [1, 0, 65, 3, 63, 32, 33, 5]
    case = paged_case([1, 2, 4, 3, 0, 1, 8, 1], seq_lens, block_size, padding_rows=3)
    cache = case.cache(random_contents(seq_lens, DIM))
    q = torch.randn(case.batch.num_tokens, HEADS, DIM)
    for got, expected in zip(
        run(attend_batched, q, cache, case.batch), run(attend_rows, q, cache, case.batch), strict=True
    ):
        torch.testing.assert_close(got, expected, rtol=TOLERANCE, atol=TOLERANCE)


def test_a_row_has_the_same_bits_beside_other_rows() -> None:
    seq_lens = [40, 7, 90, 64]
    contents = random_contents(seq_lens, DIM)
    q = torch.randn(4, HEADS, DIM)
    together = paged_case([1, 1, 1, 1], seq_lens)
    out, lse = run(attend_batched, q, together.cache(contents), together.batch)
    for sequence, content in enumerate(contents):
        alone = paged_case([1], [len(content)], seed=sequence)
        row = slice(sequence, sequence + 1)
        got = run(attend_batched, q[row], alone.cache([content]), alone.batch)
        assert torch.equal(got[0], out[row])
        assert torch.equal(got[1], lse[row])
