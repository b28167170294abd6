"""The Triton-language experts in the interpreter, against the reference."""

import pytest
import torch

from kimi_kernels.moe_experts import kernel, kernel_layer, reference
from kimi_kernels.moe_experts.kernel_sum import sum_terms
from kimi_kernels.moe_experts.launch import MAX_CHUNK, FewLaunch, sorted_launch
from kimi_kernels.moe_experts.scratch import moe_scratch_bytes
from kimi_kernels.weights import ExpertWeights
from support.expert_layers import expected_experts, random_choices, random_experts
from support.interpreted import INTERPRETED
from support.row_errors import worst_row_error

pytestmark = INTERPRETED
KINDS = ["int4", "mxfp4", "fp8", "float"]
TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3}
"""Order of sums; the rounding of activations, products and result to float16."""


@pytest.fixture(autouse=True)
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that no kernel wrote is not a number, so that reading or returning it fails."""

    def poisoned(layer: kernel_layer.Layer, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        dtype = dtype or layer.x.dtype
        return torch.full(shape, torch.nan if dtype.is_floating_point else 2**30, dtype=dtype)

    monkeypatch.setattr(kernel_layer.Layer, "empty", poisoned)


def check(
    weights: ExpertWeights,
    x: torch.Tensor,
    ids: torch.Tensor,
    topk_weights: torch.Tensor,
    first_expert: int = 0,
) -> torch.Tensor:
    out = sum_terms(kernel.moe_experts(x, ids, topk_weights, kernel.pack_experts(weights), first_expert))
    expected = expected_experts(x, ids, topk_weights, reference.pack_experts(weights), first_expert)
    assert out.dtype == x.dtype and out.shape == x.shape
    assert worst_row_error(out, expected) < TOLERANCE[x.dtype]
    return out


@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "hidden", "intermediate", "top_k", "kind"),
    [
        *((2, 5, 288, 160, 2, kind) for kind in KINDS),
        *((65, 3, 160, 288, 1, kind) for kind in KINDS),
        *((34, 8, 160, 288, 2, kind) for kind in KINDS),
        (1, 4, 64, 32, 2, "int4"),
        (3, 3, 160, 64, 3, "fp8"),
        (33, 4, 96, 64, 2, "mxfp4"),
    ],
    ids=[
        *(f"{name}, {kind}" for name in ("few", "sorted", "two halves") for kind in KINDS),
        "one",
        "all experts",
        "short tiles",
    ],
)
def test_widths_and_counts(
    num_tokens: int, num_experts: int, hidden: int, intermediate: int, top_k: int, kind: str
) -> None:
    torch.manual_seed(num_tokens)
    ids, weights = random_choices(num_tokens, num_experts, top_k)
    check(random_experts(kind, num_experts, hidden, intermediate), torch.randn(num_tokens, hidden), ids, weights)


@pytest.mark.parametrize("num_tokens", [3, 40])
def test_half_precision(num_tokens: int) -> None:
    torch.manual_seed(0)
    ids, weights = random_choices(num_tokens, 4, 2)
    check(random_experts("int4", 4, 256, 128), torch.randn(num_tokens, 256).half(), ids, weights)


@pytest.mark.parametrize("num_tokens", [4, 48])
@pytest.mark.parametrize("first_expert", [3, 6])
def test_subset_of_experts(num_tokens: int, first_expert: int) -> None:
    torch.manual_seed(0)
    ids, weights = random_choices(num_tokens, 12, 4)
    check(random_experts("int4", 4, 64, 32), torch.randn(num_tokens, 64), ids, weights, first_expert)


@pytest.mark.parametrize("num_tokens", [2, 40])
def test_no_choice_is_held_here(num_tokens: int) -> None:
    ids, weights = random_choices(num_tokens, 4, 2)
    packed = kernel.pack_experts(random_experts("int4", 4, 64, 32))
    out = sum_terms(kernel.moe_experts(torch.randn(num_tokens, 64), ids, weights, packed, first_expert=4))
    assert torch.equal(out, torch.zeros(num_tokens, 64))


@pytest.mark.parametrize("num_tokens", [6, 70])
def test_all_tokens_to_one_expert_and_others_empty(num_tokens: int) -> None:
    torch.manual_seed(0)
    ids = torch.full((num_tokens, 1), 2, dtype=torch.int32)
    check(random_experts("int4", 4, 64, 32), torch.randn(num_tokens, 64), ids, torch.rand(num_tokens, 1))


def test_an_expert_chosen_twice_by_a_token_counts_twice() -> None:
    torch.manual_seed(0)
    ids = torch.full((40, 2), 1, dtype=torch.int32)
    check(random_experts("fp8", 2, 64, 32), torch.randn(40, 64), ids, torch.rand(40, 2))


def test_more_choices_than_one_program_sorts() -> None:
    torch.manual_seed(0)
    num_tokens = MAX_CHUNK // 4 + 3
    ids, weights = random_choices(num_tokens, 6, 4)
    weights_of_experts = random_experts("float", 6, 64, 16)
    check(weights_of_experts, torch.randn(num_tokens, 64), ids, weights)


def test_few_and_many_choices_agree() -> None:
    """The unsorted kernels, split or not, and the sorted ones, on the same tokens."""
    torch.manual_seed(0)
    experts = kernel.pack_experts(random_experts("int4", 4, 512, 64))
    x, (ids, weights) = torch.randn(3, 512), random_choices(3, 4, 2)
    layer = kernel_layer.Layer(x, ids, weights, experts, 0)
    many = sorted_launch(layer.num_choices, 4, layer.down_steps, layer.tall_shapes())
    order = kernel_layer.sort_choices(layer, many.columns)
    hidden = kernel_layer.gate_up_sorted(layer, many, order)
    products = kernel_layer.down_sorted(layer, many, order, hidden)
    for splits in (1, 4):
        few = FewLaunch(splits=splits, gate_up_stages=2, down_tiles_a_group=splits, down_stages=2)
        torch.testing.assert_close(kernel_layer.gate_up_few(layer, few), hidden)
        torch.testing.assert_close(kernel_layer.down_few(layer, few, hidden), products)
        # The counts of finished programs are zero again, or the next call would sum too early.
        assert not layer.arrivals.any()


def test_strided_rows() -> None:
    torch.manual_seed(0)
    ids, weights = random_choices(9, 4, 2)
    check(random_experts("int4", 4, 64, 32), torch.randn(9, 128)[:, :64], ids, weights)


@pytest.mark.parametrize("num_tokens", [1, 7, 40, 300])
def test_scratch_is_what_the_plan_says(num_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every tensor that a call makes, the result apart, against `moe_scratch_bytes`: at most, and mostly."""
    torch.manual_seed(0)
    made: list[torch.Tensor] = []

    def recorded(layer: kernel_layer.Layer, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        made.append(torch.zeros(shape, dtype=dtype or layer.x.dtype))
        return made[-1]

    monkeypatch.setattr(kernel_layer.Layer, "empty", recorded)
    ids, weights = random_choices(num_tokens, 4, 2)
    packed = kernel.pack_experts(random_experts("int4", 4, 512, 64))
    kernel.moe_experts(torch.randn(num_tokens, 512), ids, weights, packed)
    num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in made)
    planned = moe_scratch_bytes(num_tokens, 2, 4, 512, 64, bytes_a_value=4)
    assert num_bytes <= planned
    if num_tokens == 300:
        assert planned < 1.05 * num_bytes


@pytest.mark.parametrize(("width", "is_early"), [(512, True), (1024, False)])
def test_a_wide_layer_never_starts_early(width: int, is_early: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device whose kernels may: a CPU's never do."""
    monkeypatch.setattr(kernel_layer, "pdl_options", lambda device: {"PDL": True})
    packed = kernel.pack_experts(random_experts("int4", 2, 64, width))
    layer = kernel_layer.Layer(torch.randn(1, 64), *random_choices(1, 2, 2), packed, 0)
    assert layer.early == {"PDL": is_early}


def test_no_tokens() -> None:
    packed = kernel.pack_experts(random_experts("int4", 4, 64, 32))
    out = kernel.moe_experts(torch.randn(0, 64), torch.empty(0, 2, dtype=torch.int32), torch.empty(0, 2), packed)
    assert out.shape == (0, 64)


def test_another_sets_experts_are_refused() -> None:
    packed = reference.pack_experts(random_experts("int4", 4, 64, 32))
    ids, weights = random_choices(2, 4, 2)
    with pytest.raises(ValueError, match=r"experts: got experts packed as 'reference\.float32'"):
        kernel.moe_experts(torch.randn(2, 64), ids, weights, packed)


def test_mixed_formats_are_refused() -> None:
    int4, fp8 = random_experts("int4", 2, 64, 32), random_experts("fp8", 2, 64, 32)
    with pytest.raises(ValueError, match="down: got fp8 weights, expected int4"):
        kernel.pack_experts(ExpertWeights(gate_up=int4.gate_up, down=fp8.down))


def test_wrong_widths_are_refused() -> None:
    weights = random_experts("int4", 2, 64, 32)
    with pytest.raises(ValueError, match=r"down: got shape \[2, 96, 32\]"):
        kernel.pack_experts(ExpertWeights(gate_up=weights.gate_up, down=random_experts("int4", 2, 96, 32).down))
