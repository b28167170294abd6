"""The reference of non-absorbed MLA attention against naive float64, and against the absorbed form."""

import pytest
import torch
from torch import Tensor

from kimi_kernels.linear.reference import per_head_linear
from kimi_kernels.mla_decode.reference import mla_decode
from kimi_kernels.mla_prefill.reference import mla_prefill
from support.attention_cases import PagedCase, paged_case, random_contents

SCALE = 0.2
# Keys and values are float32 products of up to 20 terms; all else is float64.
TOLERANCE = 2e-5


def naive_prefill(q: Tensor, contents: list[Tensor], case: PagedCase, w_uk: Tensor, w_uv: Tensor) -> Tensor:
    num_heads, nope_dim, kv_lora_rank = w_uk.shape
    out = torch.zeros(q.shape[0], num_heads, w_uv.shape[2], dtype=torch.float64)
    for row, sequence, num_keys in case.rows():
        latents = contents[sequence][:num_keys].double()
        for head in range(num_heads if num_keys else 0):
            keys = latents[:, :kv_lora_rank] @ w_uk[head].double().t()
            scores = keys @ q[row, head, :nope_dim].double()
            scores += latents[:, kv_lora_rank:] @ q[row, head, nope_dim:].double()
            weights = (scores * SCALE).exp()
            out[row, head] = weights / weights.sum() @ (latents[:, :kv_lora_rank] @ w_uv[head].double())
    return out


@pytest.mark.parametrize("block_size", [16, 32, 64, 128])
@pytest.mark.parametrize(
    ("num_heads", "nope_dim", "kv_lora_rank", "rope_dim", "v_dim"), [(1, 1, 4, 2, 1), (4, 8, 16, 8, 8), (3, 5, 7, 3, 9)]
)
def test_a_ragged_batch_with_empty_sequences(
    block_size: int, num_heads: int, nope_dim: int, kv_lora_rank: int, rope_dim: int, v_dim: int
) -> None:
    seq_lens = [1, 0, 65, 3, 63, block_size + 1]
    case = paged_case([1, 2, 65, 3, 0, 8], seq_lens, block_size, padding_rows=2)
    contents = random_contents(seq_lens, kv_lora_rank + rope_dim)
    q = torch.randn(case.batch.num_tokens, num_heads, nope_dim + rope_dim)
    w_uk, w_uv = torch.randn(num_heads, nope_dim, kv_lora_rank) / 4, torch.randn(num_heads, kv_lora_rank, v_dim)
    out = mla_prefill(q, case.cache(contents), w_uk, w_uv, case.batch, SCALE)
    expected = naive_prefill(q, contents, case, w_uk, w_uv)
    torch.testing.assert_close(out.double(), expected, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("cache_dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_it_equals_the_absorbed_form(cache_dtype: torch.dtype) -> None:
    seq_lens, kv_scale = [40, 7], 0.5
    case = paged_case([20, 7], seq_lens)
    cache = case.cache(random_contents(seq_lens, 20)).to(cache_dtype)
    q_nope, q_pe = torch.randn(27, 4, 8), torch.randn(27, 4, 4)
    w_uk, w_uv = torch.randn(4, 8, 16) / 4, torch.randn(4, 16, 6)
    q = torch.cat((q_nope, q_pe), dim=-1)
    out = mla_prefill(q, cache, w_uk, w_uv, case.batch, SCALE, kv_scale)
    absorbed_q = torch.cat((per_head_linear(q_nope, w_uk), q_pe), dim=-1)
    latents, _ = mla_decode(absorbed_q, cache, case.batch, 16, SCALE, kv_scale)
    torch.testing.assert_close(out, per_head_linear(latents, w_uv), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.randn(3, 2, 6)}, r"^q: got shape \[3, 2, 6\], expected \[3, 2, 7\]"),
        ({"w_uk": torch.randn(2, 5, 9)}, "^w_uv: .*expected .*9"),
        ({"w_uv": torch.randn(3, 4, 3)}, r"^w_uv: got shape \[3, 4, 3\], expected \[2, 4, any\]"),
        ({"latent_cache": torch.randn(6, 6)}, r"^latent_cache: got shape \[6, 6\]"),
        ({"latent_cache": torch.randn(6, 16, 3)}, "^w_uk: got 4 columns, expected at most latent_cache's 3"),
    ],
)
def test_a_wrong_argument_is_named(change: dict[str, Tensor], message: str) -> None:
    arguments = {
        "q": torch.randn(3, 2, 7),
        "latent_cache": torch.randn(6, 16, 6),
        "w_uk": torch.randn(2, 5, 4),
        "w_uv": torch.randn(2, 4, 3),
        "batch": paged_case([1, 2], [5, 20]).batch,
        "softmax_scale": SCALE,
    }
    with pytest.raises(ValueError, match=message):
        mla_prefill(**(arguments | change))
