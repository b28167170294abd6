"""The latent cache write, each implementation against its words: norm the latent, turn the key, write at the slot."""

from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from kimi_kernels import KernelSet
from kimi_kernels.rms_norm import naive as naive_norm
from kimi_kernels.store_latent import kernel, kernel_query, naive
from support.implementations import FLOATS, ROUNDING, assert_rounded, implementations
from support.interpreted import INTERPRETED

EPS = 1e-5
BLOCKS, BLOCK_SIZE, POSITIONS = 5, 16, 40
NUM_SLOTS = BLOCKS * BLOCK_SIZE
every_implementation = implementations("store_latent")


def arguments(kv_a: Tensor, width: int, *, interleaved: bool = True) -> dict[str, Any]:
    """The arguments that come before the cache, for a latent of this width."""
    return {
        "kv_a": kv_a,
        "norm_weight": torch.randn(width).to(kv_a.dtype),
        "eps": EPS,
        "cos_sin": torch.randn(POSITIONS, kv_a.shape[1] - width),
        "positions": torch.randint(POSITIONS, (len(kv_a),)),
        "interleaved": interleaved,
    }


def two_caches(dtype: torch.dtype, latent_dim: int = 64) -> tuple[Tensor, ...]:
    return torch.full((2, BLOCKS, BLOCK_SIZE, latent_dim), 7.0).to(dtype).unbind()


def check(
    ops: ModuleType, kv_a: Tensor, slots: Tensor, width: int = 48, *, interleaved: bool = True, scale: float = 1.0
) -> None:
    given = arguments(kv_a, width, interleaved=interleaved)
    caches = two_caches(kv_a.dtype, kv_a.shape[1])
    for implementation, cache in zip((ops, naive), caches, strict=True):
        implementation.store_latent(**given, latent_cache=cache, slot_mapping=slots, kv_scale=scale)
    assert_rounded(ops, caches[0], caches[1], kv_a.dtype)
    untouched = torch.ones(NUM_SLOTS, dtype=torch.bool).index_fill_(0, slots[slots >= 0], False)
    assert (caches[0].view(NUM_SLOTS, -1)[untouched] == 7).all()


@every_implementation
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("width", "rope_dim"), [(48, 16), (31, 6), (512, 64)])
def test_each_row_lands_in_its_slot_and_nothing_else_changes(
    ops: ModuleType, width: int, rope_dim: int, dtype: torch.dtype, interleaved: bool
) -> None:
    for num_tokens in (0, 1, 6, 33):
        slots = torch.randperm(NUM_SLOTS)[:num_tokens]
        slots[2::3] = -1
        check(ops, torch.randn(num_tokens, width + rope_dim).to(dtype), slots, width, interleaved=interleaved)


@every_implementation
def test_padding_alone_writes_nothing(ops: ModuleType) -> None:
    check(ops, torch.randn(4, 64), torch.full((4,), -1))


@pytest.fixture
def few_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a program of the kernel write several of 22 tokens: the interpreter takes 4 s for 1,100."""
    for module in (kernel, kernel_query):
        monkeypatch.setattr(module, "MANY_TOKENS", 16)


@every_implementation
@pytest.mark.usefixtures("few_are_many")
@pytest.mark.parametrize("num_tokens", [3, 22])
def test_rows_may_lie_apart(ops: ModuleType, num_tokens: int) -> None:
    wide = torch.full((num_tokens, 72), torch.nan)
    wide[:, 8:] = torch.randn(num_tokens, 64)
    slots = torch.randperm(NUM_SLOTS)[:num_tokens]
    slots[1::3] = -1
    check(ops, wide[:, 8:], slots)


@every_implementation
def test_a_scale_divides(ops: ModuleType) -> None:
    check(ops, torch.randn(3, 64), torch.tensor([4, 0, 9]), scale=0.03)


@every_implementation
@pytest.mark.parametrize("kv_scale", [1.0, 0.03])
def test_a_float8_cache_saturates(ops: ModuleType, kv_scale: float) -> None:
    kv_a, slots = torch.randn(4, 64), torch.tensor([3, 1, -1, 64])
    kv_a[1, 48:] = 1e5
    given, caches = arguments(kv_a, 48), two_caches(torch.float8_e4m3fn)
    for implementation, cache in zip((ops, naive), caches, strict=True):
        implementation.store_latent(**given, latent_cache=cache, slot_mapping=slots, kv_scale=kv_scale)
    found, expected = (cache.float() for cache in caches)
    assert (found[0, 1, 48:].abs() == 448).all()
    # A value beside a boundary may fall to either side; the interpreter drops the carry up to a power of two.
    assert (found != expected).float().mean() < 0.01


@every_implementation
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kv_a": torch.randn(2, 12)}, "^kv_a: got 12 columns, expected norm_weight's 12 and an even number more"),
        ({"kv_a": torch.randn(2, 17)}, "^kv_a: got 17 columns"),
        ({"kv_a": torch.randn(2, 1, 18)}, r"^kv_a: got shape \[2, 1, 18\]"),
        ({"kv_a": torch.ones(2, 18).int()}, "^kv_a: got torch.int32"),
        ({"kv_a": torch.randn(2, 36)[:, ::2]}, "^kv_a: got column stride 2, expected 1"),
        ({"norm_weight": torch.ones(1, 12)}, r"^norm_weight: got shape \[1, 12\]"),
        ({"cos_sin": torch.randn(50, 8)}, r"^cos_sin: got shape \[50, 8\], expected \[any, 6\]"),
        ({"positions": torch.arange(3)}, r"^positions: got shape \[3\], expected \[2\]"),
        ({"slot_mapping": torch.arange(3)}, r"^slot_mapping: got shape \[3\], expected \[2\]"),
        ({"slot_mapping": torch.arange(2).int()}, "^slot_mapping: got torch.int32"),
        ({"latent_cache": torch.randn(2, 16, 17)}, r"^latent_cache: got shape \[2, 16, 17\]"),
        ({"latent_cache": torch.randn(16, 2, 18).transpose(0, 1)}, "^latent_cache: got strides"),
    ],
)
def test_a_wrong_argument_is_named(ops: ModuleType, change: dict[str, Tensor], message: str) -> None:
    given = arguments(torch.randn(2, 18), 12)
    given |= {"latent_cache": torch.zeros(2, 16, 18), "slot_mapping": torch.arange(2)}
    with pytest.raises(ValueError, match=message):
        ops.store_latent(**(given | change))


every_set = pytest.mark.parametrize(
    "kernels",
    [pytest.param(KernelSet.plain(), id="plain"), pytest.param(KernelSet.triton(), id="kernel", marks=INTERPRETED)],
)


@every_set
@pytest.mark.usefixtures("few_are_many")
@pytest.mark.parametrize(("num_tokens", "interleaved"), [(0, True), (6, True), (6, False), (22, True)])
def test_queries_are_normed_beside_the_write(kernels: KernelSet, num_tokens: int, interleaved: bool) -> None:
    """Many tokens take two launches of the kernels."""
    both, query_weight = torch.randn(num_tokens, 40 + 64, dtype=torch.float16), torch.randn(40).half()
    slots = torch.randperm(NUM_SLOTS)[:num_tokens]
    slots[1::3] = -1
    given, caches = arguments(both[:, 40:], 48, interleaved=interleaved), two_caches(torch.float16)
    normed = kernels.norm_store_latent(both[:, :40], query_weight, **given, latent_cache=caches[0], slot_mapping=slots)
    naive.store_latent(**given, latent_cache=caches[1], slot_mapping=slots)
    tolerance = 2 * ROUNDING[torch.float16]
    torch.testing.assert_close(caches[0], caches[1], rtol=tolerance, atol=tolerance)
    expected = naive_norm.rms_norm(both[:, :40], query_weight, EPS)
    torch.testing.assert_close(normed.double(), expected, rtol=tolerance, atol=tolerance)


@every_set
@pytest.mark.parametrize(
    ("name", "value"),
    [("query", torch.ones(3, 5)), ("query", torch.ones(2, 4)), ("latent_cache", torch.zeros(2, 4, 7))],
)
def test_a_query_or_cache_that_does_not_fit_is_named(kernels: KernelSet, name: str, value: Tensor) -> None:
    given = arguments(torch.ones(3, 6), 4) | {"query": torch.ones(3, 4), "query_weight": torch.ones(4)}
    given |= {"latent_cache": torch.zeros(2, 4, 6), "slot_mapping": torch.arange(3), name: value}
    with pytest.raises(ValueError, match=f"^{name}: got shape"):
        kernels.norm_store_latent(**given)
