"""The CPU kernel set's absorbed attention against the reference's: NaN in unused slots, huge ids in unused entries."""

import pytest
import torch

from kimi_kernels.mla_decode import reference
from kimi_kernels.mla_decode.cpu import mla_decode
from support.attention_cases import paged_case, random_contents

# float32 scores and probabilities of up to 200 keys.
TOLERANCE = 1e-5
SCALE = 0.17


@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize(("num_heads", "kv_lora_rank", "rope_dim"), [(8, 64, 16), (1, 16, 16), (17, 7, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_ragged_batch_with_empty_sequences(
    block_size: int, num_heads: int, kv_lora_rank: int, rope_dim: int, dtype: torch.dtype
) -> None:
    seq_lens = [1, 0, 65, 3, 63, block_size, block_size + 1, 200]
    case = paged_case([1, 2, 4, 3, 0, 1, 8, 1], seq_lens, block_size, padding_rows=3)
    cache = case.cache([content.to(dtype) for content in random_contents(seq_lens, kv_lora_rank + rope_dim)])
    q = torch.randn(case.batch.num_tokens, num_heads, kv_lora_rank + rope_dim)
    out, lse = mla_decode(q, cache, case.batch, kv_lora_rank, SCALE)
    expected, _ = reference.mla_decode(q, cache, case.batch, kv_lora_rank, SCALE)
    assert lse is None
    torch.testing.assert_close(out, expected, rtol=TOLERANCE, atol=TOLERANCE)


def test_the_scale_of_the_cache_counts_and_the_sum_is_returned_on_demand() -> None:
    case = paged_case([2], [9])
    cache = case.cache(random_contents([9], 32))
    q = torch.randn(2, 4, 32)
    scaled, _ = mla_decode(q, cache, case.batch, 16, SCALE, kv_scale=2.0)
    doubled, _ = mla_decode(q, 2 * cache, case.batch, 16, SCALE)
    assert torch.equal(scaled, doubled)
    _, lse = mla_decode(q, cache, case.batch, 16, SCALE, return_lse=True)
    _, expected = reference.mla_decode(q, cache, case.batch, 16, SCALE, return_lse=True)
    assert lse is not None
    assert torch.equal(lse, expected)


def test_a_query_of_another_width_is_refused() -> None:
    case = paged_case([1], [3])
    with pytest.raises(ValueError, match="q: got shape"):
        mla_decode(torch.randn(1, 2, 16), case.cache(random_contents([3], 32)), case.batch, 16, SCALE)
