"""Merging and W_uv in one launch, in Triton-language's interpreter, against the two ops of the reference."""

import dataclasses

import pytest
import torch

from kimi_kernels.compositions import composed_mla_values
from kimi_kernels.linear.reference import per_head_linear
from kimi_kernels.mla_decode import kernel, kernel_values, reference
from kimi_kernels.mla_decode.kernel import plan_mla_decode
from support.attention_cases import paged_case, random_contents
from support.interpreted import INTERPRETED
from support.row_errors import worst_row_error

pytestmark = INTERPRETED
RANK, ROPE, WIDTH, SCALE = 32, 16, 40, 0.17
expected_values = composed_mla_values(reference.mla_decode, per_head_linear)


@pytest.mark.parametrize(
    ("query_lens", "seq_lens", "padding", "split_tokens", "is_fused", "dtype"),
    [
        ([1], [1300], 0, 0, True, torch.float32),
        ([4, 0, 2, 1], [300, 64, 0, 65], 1, 0, True, torch.float16),
        ([1] * 9, [65] * 9, 0, 0, False, torch.float32),
        ([2, 1], [100, 70], 0, 64, False, torch.float16),
    ],
    ids=["pieces read twice", "ragged with padding", "many programs", "fixed splits"],
)
def test_as_the_two_ops(
    query_lens: list[int],
    seq_lens: list[int],
    padding: int,
    split_tokens: int,
    is_fused: bool,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = paged_case(query_lens, seq_lens, 64, padding_rows=padding)
    torch.manual_seed(0)
    q = torch.randn(case.batch.num_tokens, 8, RANK + ROPE).to(dtype)
    cache = case.cache(random_contents([len(slots) for slots in case.slots], RANK + ROPE)).to(dtype)
    w_uv = (torch.randn(8, RANK, WIDTH) / RANK**0.5).to(dtype)
    monkeypatch.setattr(kernel, "_num_processors", lambda device: 18)
    launched = []
    merge = kernel_values._merge_values
    monkeypatch.setattr(kernel_values, "_merge_values", lambda *given: launched.append(1) or merge(*given))
    batch = dataclasses.replace(case.batch, decode_plan=plan_mla_decode(case.batch, 8, 64, split_tokens))
    found = kernel_values.mla_values(q, cache, batch, w_uv, SCALE)
    assert bool(launched) == is_fused and found.dtype == dtype
    expected = expected_values(q.float(), cache.float(), case.batch, w_uv.float(), SCALE)
    assert worst_row_error(found, expected) < (2e-6 if dtype == torch.float32 else 2e-3)


def test_no_rows() -> None:
    case = paged_case([0], [64], 64)
    cache = case.cache(random_contents([64], RANK + ROPE))
    found = kernel_values.mla_values(torch.randn(0, 8, RANK + ROPE), cache, case.batch, torch.randn(8, RANK, 40), SCALE)
    assert found.shape == (0, 8, 40)
