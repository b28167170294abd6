"""The CPU kernel set's attention of the Llama draft against the reference's."""

import pytest
import torch

from kimi_kernels.mha_attention import reference
from kimi_kernels.mha_attention.cpu import mha_attention, store_kv
from support.attention_cases import paged_case, random_contents

# float32 scores and probabilities of up to 130 keys.
TOLERANCE = 1e-5


@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(8, 2, 32), (4, 4, 16), (6, 3, 7)])
@pytest.mark.parametrize("sliding_window", [None, 20])
def test_a_ragged_batch_with_empty_sequences(
    block_size: int, num_heads: int, num_kv_heads: int, head_dim: int, sliding_window: int | None
) -> None:
    seq_lens = [1, 0, 65, 3, 63, block_size, block_size + 1, 130]
    case = paged_case([1, 2, 4, 3, 0, 1, 8, 1], seq_lens, block_size, padding_rows=2)
    cache = case.cache(random_contents(seq_lens, 2, num_kv_heads, head_dim)).permute(2, 0, 1, 3, 4).contiguous()
    q = torch.randn(case.batch.num_tokens, num_heads, head_dim)
    got = mha_attention(q, cache, case.batch, 0.3, sliding_window)
    expected = reference.mha_attention(q, cache, case.batch, 0.3, sliding_window)
    torch.testing.assert_close(got, expected, rtol=TOLERANCE, atol=TOLERANCE)


def test_scaled_caches_are_read_as_the_reference_reads_them() -> None:
    case = paged_case([3, 1], [40, 7])
    cache = case.cache(random_contents([40, 7], 2, 2, 16)).permute(2, 0, 1, 3, 4).contiguous()
    q = torch.randn(case.batch.num_tokens, 4, 16)
    for each in (cache, cache.to(torch.float8_e4m3fn)):
        got = mha_attention(q, each, case.batch, 0.3, None, 0.5)
        expected = reference.mha_attention(q, each, case.batch, 0.3, None, 0.5)
        torch.testing.assert_close(got, expected, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("kv_scale", [1.0, 0.5])
def test_keys_and_values_are_written_where_they_belong(dtype: torch.dtype, kv_scale: float) -> None:
    k, v = torch.randn(2, 5, 2, 16).unbind()
    slots = torch.tensor([3, -1, 40, 17, -1])
    caches = torch.full((2, 2, 3, 16, 2, 16), 7.0).to(dtype).unbind()
    for op, cache in zip((store_kv, reference.store_kv), caches, strict=True):
        op(k, v, cache, slots, kv_scale)
    assert torch.equal(caches[0].float(), caches[1].float())


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="v: got shape"):
        store_kv(torch.randn(1, 2, 16), torch.randn(1, 2, 8), torch.zeros(2, 1, 16, 2, 16), torch.tensor([0]))
    case = paged_case([1], [3])
    cache = case.cache(random_contents([3], 2, 2, 16)).permute(2, 0, 1, 3, 4).contiguous()
    with pytest.raises(ValueError, match="q: got 3 heads"):
        mha_attention(torch.randn(1, 3, 16), cache, case.batch, 0.3, None)
