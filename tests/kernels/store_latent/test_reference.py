"""The reference latent write against its formula: norm the latent, turn the key, write both at the slot."""

import math

import pytest
import torch
from torch import Tensor

from kimi_kernels.store_latent.reference import store_latent

KV_LORA_RANK, ROPE_DIM, EPS = 12, 6, 1e-5
LATENT_DIM = KV_LORA_RANK + ROPE_DIM


def table(width: int = ROPE_DIM) -> Tensor:
    turn = torch.arange(50, dtype=torch.float64)[:, None] * torch.linspace(1, 0.1, width // 2, dtype=torch.float64)
    return torch.cat((turn.cos(), turn.sin()), dim=-1).float()


def naive_row(kv_a: Tensor, weight: Tensor, position: int, interleaved: bool) -> Tensor:
    row, half = kv_a.double(), ROPE_DIM // 2
    scale = math.sqrt((row[:KV_LORA_RANK] ** 2).mean().item() + EPS)
    out = torch.cat((row[:KV_LORA_RANK] / scale * weight.double(), row[KV_LORA_RANK:]))
    cos_sin = table().double()[position]
    for i in range(half):
        first, second = (2 * i, 2 * i + 1) if interleaved else (i, i + half)
        a, b = row[KV_LORA_RANK + first], row[KV_LORA_RANK + second]
        cos, sin = cos_sin[i], cos_sin[half + i]
        out[KV_LORA_RANK + first], out[KV_LORA_RANK + second] = a * cos - b * sin, b * cos + a * sin
    return out


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("num_tokens", [0, 1, 3, 63])
def test_each_row_lands_in_its_slot_and_nothing_else_changes(num_tokens: int, interleaved: bool) -> None:
    torch.manual_seed(num_tokens)
    kv_a, weight = torch.randn(num_tokens, LATENT_DIM), torch.randn(KV_LORA_RANK)
    positions = torch.randint(0, 50, (num_tokens,))
    slots = torch.randperm(96)[:num_tokens]
    cache = torch.full((6, 16, LATENT_DIM), torch.nan)
    store_latent(kv_a, weight, EPS, table(), positions, interleaved, cache, slots)
    flat = cache.view(96, LATENT_DIM)
    for token in range(num_tokens):
        expected = naive_row(kv_a[token], weight, int(positions[token]), interleaved)
        torch.testing.assert_close(flat[slots[token]].double(), expected, rtol=1e-6, atol=1e-6)
    untouched = torch.ones(96, dtype=torch.bool).index_fill_(0, slots, False)
    assert flat[untouched].isnan().all()


def test_a_negative_slot_writes_nothing() -> None:
    kv_a, cache = torch.randn(4, LATENT_DIM), torch.zeros(2, 16, LATENT_DIM)
    slots = torch.tensor([-1, 5, -1, 31])
    store_latent(kv_a, torch.ones(KV_LORA_RANK), EPS, table(), torch.arange(4), True, cache, slots)
    assert cache.view(32, -1).abs().sum(-1).nonzero().flatten().tolist() == [5, 31]
    all_padding = torch.full((4,), -1)
    before = cache.clone()
    store_latent(kv_a, torch.ones(KV_LORA_RANK), EPS, table(), torch.arange(4), True, cache, all_padding)
    assert torch.equal(cache, before)


def test_rows_may_be_strided() -> None:
    wide, weight = torch.randn(5, LATENT_DIM + 7), torch.randn(KV_LORA_RANK)
    caches = torch.zeros(2, 1, 16, LATENT_DIM)
    for kv_a, cache in ((wide[:, 7:], caches[0]), (wide[:, 7:].contiguous(), caches[1])):
        store_latent(kv_a, weight, EPS, table(), torch.arange(5), True, cache, torch.arange(5))
    assert torch.equal(caches[0], caches[1])


@pytest.mark.parametrize("kv_scale", [1.0, 0.25])
def test_a_float8_cache_holds_the_value_over_the_scale_and_saturates(kv_scale: float) -> None:
    torch.manual_seed(0)
    kv_a, weight = torch.randn(4, LATENT_DIM), torch.ones(KV_LORA_RANK)
    kv_a[0, -1] = 1e5
    wide = torch.zeros(1, 16, LATENT_DIM)
    cache = torch.zeros(1, 16, LATENT_DIM).to(torch.float8_e4m3fn)
    arguments = (kv_a, weight, EPS, table(), torch.zeros(4, dtype=torch.int64), True)
    slots = torch.tensor([3, 0, -1, 9])
    store_latent(*arguments, wide, slots)
    store_latent(*arguments, cache, slots, kv_scale)
    expected = (wide / kv_scale).clamp(-448, 448).to(torch.float8_e4m3fn).float()
    assert torch.equal(cache.float(), expected)
    assert cache.float()[0, 3, -1] == 448


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kv_a": torch.randn(2, KV_LORA_RANK)}, "^kv_a: got 12 columns, expected more than norm_weight's 12"),
        ({"kv_a": torch.randn(2, 1, LATENT_DIM)}, r"^kv_a: got shape \[2, 1, 18\]"),
        ({"cos_sin": table(8)}, r"^cos_sin: got shape \[50, 8\], expected \[any, 6\]"),
        ({"positions": torch.arange(3)}, r"^positions: got shape \[3\], expected \[2\]"),
        ({"slot_mapping": torch.arange(3)}, r"^slot_mapping: got shape \[3\], expected \[2\]"),
        ({"slot_mapping": torch.arange(2).int()}, "^slot_mapping: got torch.int32"),
        (
            {"latent_cache": torch.randn(2, 16, 17)},
            r"^latent_cache: got shape \[2, 16, 17\], expected \[any, any, 18\]",
        ),
        ({"latent_cache": torch.randn(16, 2, LATENT_DIM).transpose(0, 1)}, "^latent_cache: got strides"),
    ],
)
def test_a_wrong_argument_is_named(change: dict[str, Tensor], message: str) -> None:
    arguments = {
        "kv_a": torch.randn(2, LATENT_DIM),
        "norm_weight": torch.ones(KV_LORA_RANK),
        "eps": EPS,
        "cos_sin": table(),
        "positions": torch.arange(2),
        "interleaved": True,
        "latent_cache": torch.zeros(2, 16, LATENT_DIM),
        "slot_mapping": torch.arange(2),
    }
    with pytest.raises(ValueError, match=message):
        store_latent(**(arguments | change))
