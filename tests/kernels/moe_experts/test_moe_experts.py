"""The routed experts, each implementation against float64 products; how the kernels are launched."""

import dataclasses
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from kimi_kernels import half_products
from kimi_kernels.kernel_interpreter import INTERPRETER_PROCESSORS
from kimi_kernels.linear.plain import FLOAT_KIND, HALF_KIND, TILED_KIND
from kimi_kernels.moe_experts import kernel, kernel_layer, kernel_sum, naive, plain
from kimi_kernels.moe_experts.kernel_align import TILE_COUNT_SHIFT
from kimi_kernels.moe_experts.launch import MAX_CHUNK, PERSISTENT_COLUMNS, FewLaunch, HopperShapes, sorted_launch
from kimi_kernels.moe_experts.op import ExpertOutputs
from kimi_kernels.moe_experts.scratch import moe_scratch_bytes
from kimi_kernels.quantization.tiles import GATE_UP_STRIPE
from kimi_kernels.rms_norm import kernel as kernel_norm
from kimi_kernels.rms_norm import plain as plain_norm
from kimi_kernels.weights import ExpertWeights
from support.expert_layers import random_assignments, random_experts, random_weight
from support.implementations import ROUNDING, implementations
from support.interpreted import INTERPRETED
from support.row_errors import worst_row_error

KINDS = ["int4", "mxfp4", "fp8", "float"]
HALF = HALF_KIND if half_products.is_available() else FLOAT_KIND
every_implementation = implementations("moe_experts")


@pytest.fixture(autouse=True)
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that no kernel wrote is not a number, so that reading or returning it fails."""

    def poisoned(layer: kernel_layer.Layer, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        dtype = dtype or layer.x.dtype
        return torch.full(shape, torch.nan if dtype.is_floating_point else 2**30, dtype=dtype)

    monkeypatch.setattr(kernel_layer.Layer, "empty", poisoned)


def run(
    ops: ModuleType, weights: ExpertWeights, x: Tensor, ids: Tensor, topk_weights: Tensor, first_expert: int = 0
) -> Tensor:
    terms = ops.moe_experts(x, ids, topk_weights, ops.pack_experts(weights), first_expert)
    return kernel_sum.sum_terms(terms) if isinstance(terms, ExpertOutputs) else terms


def check(
    ops: ModuleType, weights: ExpertWeights, x: Tensor, ids: Tensor, topk_weights: Tensor, first_expert: int = 0
) -> Tensor:
    """Compare experts with their judge; they change none of their arguments."""
    before = x.clone(), ids.clone(), topk_weights.clone()
    out = run(ops, weights, x, ids, topk_weights, first_expert)
    expected = naive.moe_experts(x, ids, topk_weights, weights, first_expert)
    assert out.dtype == x.dtype and out.is_contiguous()
    assert worst_row_error(out, expected) < ROUNDING[x.dtype]
    assert all(map(torch.equal, before, (x, ids, topk_weights)))
    return out


@every_implementation
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "hidden", "intermediate", "top_k"),
    [(2, 5, 288, 160, 2), (65, 3, 160, 288, 1), (34, 8, 160, 288, 2), (1, 4, 64, 32, 2)],
    ids=["few", "sorted", "two halves", "one"],
)
def test_widths_and_counts(
    ops: ModuleType, kind: str, num_tokens: int, num_experts: int, hidden: int, intermediate: int, top_k: int
) -> None:
    weights = random_experts(kind, num_experts, hidden, intermediate)
    check(ops, weights, torch.randn(num_tokens, hidden), *random_assignments(num_tokens, num_experts, top_k))


@every_implementation
def test_a_token_may_take_every_expert(ops: ModuleType) -> None:
    check(ops, random_experts("fp8", 3, 160, 64), torch.randn(3, 160), *random_assignments(3, 3, 3))


@every_implementation
def test_tiles_of_few_tokens(ops: ModuleType) -> None:
    check(ops, random_experts("mxfp4", 4, 96, 64), torch.randn(33, 96), *random_assignments(33, 4, 2))


@every_implementation
@pytest.mark.parametrize("num_tokens", [3, 40])
def test_half_precision(ops: ModuleType, num_tokens: int) -> None:
    check(
        ops,
        random_experts("int4", 4, 256, 128),
        torch.randn(num_tokens, 256).half(),
        *random_assignments(num_tokens, 4, 2),
    )


@every_implementation
@pytest.mark.parametrize(("num_tokens", "first_expert"), [(0, 0), (1, 3), (4, 6), (48, 3), (2, 100), (40, 100)])
def test_some_experts_are_held_elsewhere_and_padding_takes_none(
    ops: ModuleType, num_tokens: int, first_expert: int
) -> None:
    ids, topk_weights = random_assignments(num_tokens, 12, 4)
    ids[3::5] = -1
    out = check(ops, random_experts("int4", 4, 64, 32), torch.randn(num_tokens, 64), ids, topk_weights, first_expert)
    assert (out[3::5] == 0).all()
    assert first_expert < 100 or (out == 0).all()


@every_implementation
@pytest.mark.parametrize("num_tokens", [2, 20])
def test_experts_that_nobody_takes_are_not_read(ops: ModuleType, num_tokens: int) -> None:
    weights = random_experts("float", 6, 64, 32)
    for matrix in (weights.gate_up, weights.down):
        assert isinstance(matrix, Tensor)
        matrix[2:] = torch.nan
    ids = torch.tensor([[0, 1]] * num_tokens, dtype=torch.int32)
    assert run(ops, weights, torch.randn(num_tokens, 64), ids, torch.ones(num_tokens, 2)).isfinite().all()


@every_implementation
@pytest.mark.parametrize("num_tokens", [3, 6])
def test_a_token_that_is_not_a_number_stays_alone(ops: ModuleType, num_tokens: int) -> None:
    weights, x = random_experts("int4", 4, 64, 32), torch.randn(num_tokens, 64)
    ids, topk_weights = random_assignments(num_tokens, 4, 2)
    expected = run(ops, weights, x, ids, topk_weights)
    x[2] = torch.nan
    out = run(ops, weights, x, ids, topk_weights)
    others = torch.arange(num_tokens) != 2
    assert out[2].isnan().all() and torch.equal(out[others], expected[others])


@every_implementation
@pytest.mark.parametrize("num_tokens", [6, 70])
def test_all_tokens_to_one_expert_and_others_empty(ops: ModuleType, num_tokens: int) -> None:
    ids = torch.full((num_tokens, 1), 2, dtype=torch.int32)
    check(ops, random_experts("int4", 4, 64, 32), torch.randn(num_tokens, 64), ids, torch.rand(num_tokens, 1))


@every_implementation
@pytest.mark.parametrize("num_tokens", [1, 40])
def test_an_expert_taken_twice_by_a_token_counts_twice(ops: ModuleType, num_tokens: int) -> None:
    ids = torch.full((num_tokens, 2), 1, dtype=torch.int32)
    check(ops, random_experts("fp8", 2, 64, 32), torch.randn(num_tokens, 64), ids, torch.rand(num_tokens, 2))


@every_implementation
@pytest.mark.parametrize("num_tokens", [1, 5])
def test_experts_are_added_in_the_order_of_its_assignments(ops: ModuleType, num_tokens: int) -> None:
    """Another order gives other bits: large terms that cancel."""
    down = torch.eye(16).expand(3, 16, 16) * torch.tensor([1e8, 1.0, -1e8])[:, None, None]
    weights, x = ExpertWeights(gate_up=torch.ones(3, 32, 16), down=down.contiguous()), torch.ones(num_tokens, 16)
    alone = run(ops, weights, x, torch.ones(num_tokens, 1, dtype=torch.int32), torch.ones(num_tokens, 1))
    for order, is_alone in (([0, 2, 1], True), ([2, 0, 1], True), ([0, 1, 2], False), ([1, 0, 2], False)):
        ids = torch.tensor([order] + [[2, 1, 0]] * (num_tokens - 1), dtype=torch.int32)
        out = run(ops, weights, x, ids, torch.ones(num_tokens, 3))
        assert torch.equal(out[0], alone[0]) == is_alone, order


@every_implementation
@pytest.mark.parametrize("num_tokens", [3, 9])
def test_rows_may_lie_apart(ops: ModuleType, num_tokens: int) -> None:
    wide = torch.full((2 * num_tokens, 128), torch.nan)
    wide[::2, 10:74] = torch.randn(num_tokens, 64)
    check(ops, random_experts("int4", 4, 64, 32), wide[::2, 10:74], *random_assignments(num_tokens, 4, 2))


@pytest.mark.parametrize("num_tokens", [0, 1, 2, 4, 17, 130])
@pytest.mark.parametrize(
    ("dtype", "hidden", "intermediate", "kind"),
    [
        (torch.float32, 192, 128, FLOAT_KIND),
        (torch.float32, 48, 16, FLOAT_KIND),
        (torch.float32, 63, 20, TILED_KIND),
        (torch.float32, 33, 5, TILED_KIND),
        (torch.bfloat16, 192, 128, HALF),
    ],
)
def test_plain_weights_of_any_width(
    num_tokens: int, dtype: torch.dtype, hidden: int, intermediate: int, kind: str
) -> None:
    """Twelve experts to take, ten of which are held here."""
    weights = random_experts("plain", 10, hidden, intermediate, dtype=dtype)
    assert plain.pack_experts(weights).kind == kind
    ids, topk_weights = random_assignments(num_tokens, 12, 3)
    ids[3::5] = -1
    check(plain, weights, torch.randn(num_tokens, hidden), ids, topk_weights, first_expert=2)


def test_experts_are_of_one_kind() -> None:
    """One expert that float16 cannot hold keeps all in float32."""
    weights = random_experts("plain", 3, 32, 16, dtype=torch.bfloat16)
    assert isinstance(weights.down, Tensor)
    weights.down[2] *= 1e7
    assert plain.pack_experts(weights).kind == FLOAT_KIND
    check(plain, weights, torch.randn(6, 32), *random_assignments(6, 3, 2))


@pytest.mark.parametrize("kind", ["int4", "mxfp4", "fp8"])
def test_experts_are_widened_one_at_a_time(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU that holds the float32 matrices of a layer's experts need not hold what makes all of them beside it."""
    for cpu_kind in ("pack_half", "_float_matrix"):
        monkeypatch.setattr(f"kimi_kernels.linear.plain.{cpu_kind}", lambda weight: None)
    weights = random_experts(kind, 5, 128, 64)
    packed = plain.pack_experts(weights)
    assert packed.kind == TILED_KIND
    assert {matrix.untyped_storage().nbytes() for matrix in packed.tensors} == {4 * 128 * 128, 4 * 64 * 128}
    check(plain, weights, torch.randn(6, 128), *random_assignments(6, 5, 2))


OUTPUTS = ExpertOutputs(
    outputs=torch.randn(15, 300, generator=torch.Generator().manual_seed(0)).half(),
    topk_ids=torch.tensor([[4, 5, 6], [7, 9, 3], [-1, -1, -1], [5, 5, 8], [0, 1, 2]], dtype=torch.int32),
    topk_weights=torch.rand(5, 3, generator=torch.Generator().manual_seed(0)),
    first_expert=3,
    num_experts=5,
)
OUTPUTS.outputs[[4, 6, 7, 8, 11, 12, 13, 14]] = torch.nan  # of experts held elsewhere
every_sum = pytest.mark.parametrize(
    ("sums", "norms"),
    [
        pytest.param(plain, plain_norm, id="plain"),
        pytest.param(kernel_sum, kernel_norm, id="kernel", marks=INTERPRETED),
    ],
)


@every_sum
@pytest.mark.parametrize("has_second", [False, True])
def test_outputs_are_summed_wherever_they_are_added(sums: ModuleType, norms: ModuleType, has_second: bool) -> None:
    second = torch.randn(5, 300).half() if has_second else None
    expected = naive.sum_terms(OUTPUTS, second)
    found = sums.sum_terms(OUTPUTS, second)
    torch.testing.assert_close(found, expected, rtol=ROUNDING[torch.float16], atol=ROUNDING[torch.float16])
    assert has_second or (found[[2, 4]] == 0).all(), "padding, and a token whose experts are all elsewhere"
    residual, weight = torch.randn(5, 300), torch.rand(300)
    pairs = zip(
        norms.add_rms_norm(OUTPUTS, residual, weight, 1e-5, second),
        plain_norm.add_rms_norm(expected, residual, weight, 1e-5),
        strict=True,
    )
    for out, want in pairs:
        torch.testing.assert_close(out, want, rtol=2e-3, atol=2e-3)


@every_sum
def test_a_sum_of_a_tensor_is_itself(sums: ModuleType, norms: ModuleType) -> None:
    x, second = torch.randn(3, 8), torch.randn(3, 8)
    assert sums.sum_terms(x) is x
    assert torch.equal(sums.sum_terms(x, second), x + second)
    for wrong, message in ((second[:2], "^second: got shape"), (second.half(), "^second: got torch.float16")):
        for terms in (x, OUTPUTS):
            with pytest.raises(ValueError, match=message if terms is x else "^second: got shape"):
                sums.sum_terms(terms, wrong)


@every_implementation
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.ones(3, 48)}, r"^x: got shape \[3, 48\], expected \[any, 64\]"),
        ({"x": torch.ones(3, 1, 64)}, r"^x: got shape \[3, 1, 64\]"),
        ({"x": torch.ones(3, 64).int()}, "^x: got torch.int32"),
        ({"x": torch.ones(4, 64)}, r"^topk_ids: got shape \[3, 2\], expected \[4, any\]"),
        ({"topk_ids": torch.zeros(3, dtype=torch.int32)}, r"^topk_ids: got shape \[3\], expected \[3, any\]"),
        ({"topk_ids": torch.zeros(3, 2)}, "^topk_ids: got torch.float32, expected torch.int32"),
        ({"topk_weights": torch.ones(3, 1)}, r"^topk_weights: got shape \[3, 1\], expected \[3, 2\]"),
        ({"topk_weights": torch.ones(3, 2).double()}, "^topk_weights: got torch.float64"),
        (
            {"topk_ids": torch.zeros(3, 0, dtype=torch.int32), "topk_weights": torch.ones(3, 0)},
            "^topk_ids: got 0 experts a token, expected at least 1",
        ),
        ({"kind": "other"}, r"^experts: got experts packed as 'other', expected one of \['"),
    ],
)
def test_a_wrong_argument_is_named(ops: ModuleType, change: dict[str, Any], message: str) -> None:
    experts = ops.pack_experts(random_experts("int4", 4, 64, 32))
    arguments = {"x": torch.ones(3, 64), "topk_ids": torch.zeros(3, 2, dtype=torch.int32)}
    arguments |= {"topk_weights": torch.ones(3, 2)} | change
    experts = dataclasses.replace(experts, kind=arguments.pop("kind", experts.kind))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=message):
        ops.moe_experts(**arguments, experts=experts)


@every_implementation
@pytest.mark.parametrize(
    ("gate_up", "down", "message"),
    [
        (torch.ones(2, 30, 16), torch.ones(2, 16, 16), r"^gate_up: got shape \[2, 30, 16\], expected \[2, 32, 16\]"),
        (torch.ones(32, 16), torch.ones(16, 16), r"^down: got shape \[16, 16\]"),
        (random_weight("int4", 2, 64, 64), random_weight("int4", 2, 96, 32), r"^gate_up: got shape \[2, 64, 64\]"),
    ],
)
def test_weights_that_do_not_fit_are_named(ops: ModuleType, gate_up: Any, down: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ops.pack_experts(ExpertWeights(gate_up=gate_up, down=down))


kernel_alone = pytest.mark.parametrize("ops", [pytest.param(kernel, id="kernel", marks=INTERPRETED)])


@kernel_alone
def test_more_assignments_than_one_program_sorts(ops: ModuleType) -> None:
    num_tokens = MAX_CHUNK // 4 + 3
    weights = random_experts("float", 6, 64, 16)
    check(ops, weights, torch.randn(num_tokens, 64), *random_assignments(num_tokens, 6, 4))


class PersistentProducts:
    """Writes in torch what `multiply_persistent_kernel` would, from the arguments that it is launched with."""

    def __getitem__(self, grid: tuple[int]) -> "PersistentProducts":
        self.num_programs = grid[0]
        return self

    def __call__(
        self, x: Tensor, tiles: Tensor, scales: Tensor, out: Tensor, entries: Tensor, assignments: Tensor,
        num_tiles: Tensor, x_stride: int, top_k: int, out_features: int, num_row_tiles: int, num_steps: int,
        *, ACTIVATE: bool, **_: object,
    ) -> None:  # fmt: skip
        assert (x_stride, out_features) == (x.stride(0), out.shape[1])
        assert tiles.shape[1:3] == (num_row_tiles, num_steps)
        assert self.num_programs == min(INTERPRETER_PROCESSORS, len(entries) * num_row_tiles)
        codes = torch.stack([(tiles.to(torch.int32) >> 4 * plane) & 15 for plane in range(4)], dim=-2) - 8
        factors = scales.unsqueeze(-1).view(torch.bfloat16).float().unsqueeze(-1) * 2.0**-7
        weights = (codes * factors).flatten(-2).transpose(2, 3).flatten(3).flatten(1, 2)
        slots = assignments.view(-1, PERSISTENT_COLUMNS)
        for entry, places in zip(entries[: int(num_tiles)].tolist(), slots, strict=False):
            rows = places[: entry >> TILE_COUNT_SHIFT.value].long()
            product = x[rows // top_k] @ weights[entry & 0xFFFF].T
            if ACTIVATE:
                gate, up = product.unflatten(1, (-1, 2, GATE_UP_STRIPE)).unbind(2)
                product = (torch.nn.functional.silu(gate) * up).flatten(1)
            out[rows] = product[:, :out_features]


@kernel_alone
def test_the_persistent_kernel_is_told_what_it_needs(ops: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its launch for both products; experts held elsewhere add nothing."""
    monkeypatch.setattr(kernel_layer, "multiply_persistent_kernel", PersistentProducts())
    monkeypatch.setattr(kernel_layer.Layer, "hopper_shapes", lambda layer: HopperShapes(persistent=True))
    x = torch.randn(150, 512)[:, :256]
    check(ops, random_experts("int4", 3, 256, 128), x, *random_assignments(150, 4, 2), first_expert=1)


@kernel_alone
@pytest.mark.parametrize(
    ("kind", "hidden_size", "width", "gate_up_tall", "down_tall", "persistent"),
    [
        ("int4", 512, 512, True, True, True),
        ("int4", 512, 256, True, False, True),
        ("int4", 256, 512, False, True, True),
        ("int4", 512, 192, False, False, False),
        ("int4", 320, 512, False, False, False),
        ("mxfp4", 512, 512, True, True, False),
        ("fp8", 512, 512, False, False, False),
    ],
)
def test_the_kernels_for_hopper_run_for_whole_steps_of_four_bits(
    ops: ModuleType, monkeypatch: pytest.MonkeyPatch, kind: str, hidden_size: int, width: int, gate_up_tall: bool,
    down_tall: bool, persistent: bool,
) -> None:  # fmt: skip
    shapes = HopperShapes(gate_up_tall=gate_up_tall, down_tall=down_tall, persistent=persistent)
    packed = ops.pack_experts(random_experts(kind, 1, hidden_size, width))
    layer = kernel_layer.Layer(torch.randn(3, hidden_size), *random_assignments(3, 1, 1), packed, 0)
    assert layer.hopper_shapes() == HopperShapes()
    layer.gate_up_flags["PORTABLE"] = False
    assert layer.hopper_shapes() == dataclasses.replace(shapes, persistent=False)
    monkeypatch.setattr(kernel_layer, "is_hopper", lambda device: True)
    assert layer.hopper_shapes() == shapes


@kernel_alone
def test_each_assignment_has_one_place_in_the_persistent_kernels_tiles(ops: ModuleType) -> None:
    """Tiles are of 192, which no kernel that the interpreter runs takes; an expert of three fills two."""
    num_tokens = 300
    packed = ops.pack_experts(random_experts("float", 3, 64, 16))
    ids = torch.randint(0, 2, (num_tokens, 2), dtype=torch.int32) + torch.tensor([0, 1], dtype=torch.int32)
    layer = kernel_layer.Layer(torch.randn(num_tokens, 64), ids, torch.ones(num_tokens, 2), packed, 0)
    order = kernel_layer.sort_assignments(layer, PERSISTENT_COLUMNS)
    entries = order.entries[: int(order.num_tiles)].tolist()
    found: list[list[int]] = [[] for _ in range(3)]
    for entry, slots in zip(entries, order.assignments.view(-1, PERSISTENT_COLUMNS).tolist(), strict=False):
        found[entry & 0xFFFF] += slots[: entry >> TILE_COUNT_SHIFT.value]
    assert found == [torch.nonzero(ids.flatten() == expert).flatten().tolist() for expert in range(3)]


@kernel_alone
def test_few_and_many_assignments_agree(ops: ModuleType) -> None:
    """The unsorted kernels, split or not, and the sorted ones, on the same tokens."""
    experts = ops.pack_experts(random_experts("int4", 4, 512, 64))
    x, (ids, weights) = torch.randn(3, 512), random_assignments(3, 4, 2)
    layer = kernel_layer.Layer(x, ids, weights, experts, 0)
    many = sorted_launch(layer.num_assignments, 4, layer.down_steps, layer.hopper_shapes())
    order = kernel_layer.sort_assignments(layer, many.columns)
    hidden = kernel_layer.gate_up_sorted(layer, many, order)
    products = kernel_layer.down_sorted(layer, many, order, hidden)
    for splits in (1, 4):
        few = FewLaunch(splits=splits, gate_up_stages=2, down_tiles_a_group=splits, down_stages=2)
        torch.testing.assert_close(kernel_layer.gate_up_few(layer, few), hidden)
        torch.testing.assert_close(kernel_layer.down_few(layer, few, hidden), products)
        # The counts of finished programs are zero again, or the next call would sum too early.
        assert not layer.arrivals.any()


@kernel_alone
@pytest.mark.parametrize("num_tokens", [1, 7, 40, 300])
def test_scratch_is_what_the_plan_says(ops: ModuleType, num_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every tensor that a call makes, the result apart, against `moe_scratch_bytes`: at most, and mostly."""
    made: list[Tensor] = []

    def recorded(layer: kernel_layer.Layer, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        made.append(torch.zeros(shape, dtype=dtype or layer.x.dtype))
        return made[-1]

    monkeypatch.setattr(kernel_layer.Layer, "empty", recorded)
    x, (ids, weights) = torch.randn(num_tokens, 512), random_assignments(num_tokens, 4, 2)
    ops.moe_experts(x, ids, weights, ops.pack_experts(random_experts("int4", 4, 512, 64)))
    num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in made)
    planned = moe_scratch_bytes(num_tokens, 2, 4, 512, 64, bytes_a_value=4)
    assert num_bytes <= planned
    if num_tokens == 300:
        assert planned < 1.05 * num_bytes


@kernel_alone
@pytest.mark.parametrize(("width", "is_early"), [(512, True), (1024, False)])
def test_a_wide_layer_never_starts_early(
    ops: ModuleType, width: int, is_early: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device whose kernels may: a CPU's never do."""
    monkeypatch.setattr(kernel_layer, "pdl_options", lambda device: {"PDL": True})
    packed = ops.pack_experts(random_experts("int4", 2, 64, width))
    layer = kernel_layer.Layer(torch.randn(1, 64), *random_assignments(1, 2, 2), packed, 0)
    assert layer.early == {"PDL": is_early}


@kernel_alone
def test_mixed_formats_are_refused(ops: ModuleType) -> None:
    int4, fp8 = random_experts("int4", 2, 64, 32), random_experts("fp8", 2, 64, 32)
    with pytest.raises(ValueError, match="down: got fp8 weights, expected int4"):
        ops.pack_experts(ExpertWeights(gate_up=int4.gate_up, down=fp8.down))
