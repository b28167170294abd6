"""Fused and borrowed tensors of a checkpoint, under the names that models ask for."""

import pytest
import torch

from kimi_backend.checkpoint.canonical_tensors import EMBEDDING, HEAD, CanonicalTensors
from kimi_backend.checkpoint.tensor_source import InMemoryTensors
from kimi_backend.checkpoint.tensor_spec import Specs, TensorRole, TensorSpec
from kimi_backend.errors import CheckpointError

PREFIX = "layers.0.mlp"


def spec(role: TensorRole, *shape: int) -> TensorSpec:
    return TensorSpec(role=role, shape=shape, dtypes=(torch.float32,))


def both(suffix: str, found: TensorSpec) -> Specs:
    return {f"{PREFIX}.{part}.{suffix}": found for part in ("gate_proj", "up_proj")}


def test_rows_of_a_fused_matrix_are_read_as_its_parts_are_asked_for() -> None:
    stacked = torch.arange(24.0).reshape(6, 4)
    specs = both("weight", spec(TensorRole.LINEAR, 3, 4))
    source = CanonicalTensors.of_target(InMemoryTensors({f"{PREFIX}.gate_up_proj.weight": stacked}), specs, "x")
    gate, up = f"{PREFIX}.gate_proj.weight", f"{PREFIX}.up_proj.weight"
    assert source.names() == {gate, up}
    assert (source.shape(gate), source.shape(up), source.dtype(up)) == ((3, 4), (3, 4), torch.float32)
    assert torch.equal(source.read(gate), stacked[:3])
    assert torch.equal(source.read(up), stacked[3:])
    assert torch.equal(source.read(up, 0, 1, 2), stacked[4:5])
    assert torch.equal(source.read(up, 0, 1), stacked[4:])
    assert torch.equal(source.read(up, 1, 1, 3), stacked[3:, 1:3])
    assert torch.equal(source.read(up, 1, 2), stacked[3:, 2:])


def test_one_scale_is_that_of_every_part_and_a_stored_shape_of_none() -> None:
    scale = torch.tensor(0.5)
    specs = both("weight_scale", spec(TensorRole.FP8_SCALES, 1)) | both("weight_shape", spec(TensorRole.INT4_SHAPE, 2))
    stored = {
        f"{PREFIX}.gate_up_proj.weight_scale": scale,
        f"{PREFIX}.gate_up_proj.weight_shape": torch.tensor([6, 4]),
    }
    source = CanonicalTensors.of_target(InMemoryTensors(stored), specs, "x")
    assert source.names() == {f"{PREFIX}.gate_proj.weight_scale", f"{PREFIX}.up_proj.weight_scale"}
    assert source.read(f"{PREFIX}.up_proj.weight_scale") == scale


def test_a_fused_tensor_that_nobody_asks_in_parts_stays_whole() -> None:
    name = f"{PREFIX}.gate_up_proj.weight"
    stored = InMemoryTensors({name: torch.zeros(6, 4)})
    assert CanonicalTensors.of_target(stored, {}, "x").names() == {name}
    whole = {name: spec(TensorRole.LINEAR, 6, 4)} | both("weight", spec(TensorRole.LINEAR, 3, 4))
    assert CanonicalTensors.of_target(stored, whole, "x").names() == {name}


@pytest.mark.parametrize("shape", [(5, 4), (7, 4), ()])
def test_rows_that_are_not_those_of_the_parts_are_named(shape: tuple[int, ...]) -> None:
    stored = InMemoryTensors({f"{PREFIX}.gate_up_proj.weight": torch.zeros(shape)})
    found = shape[0] if shape else 0
    with pytest.raises(CheckpointError, match=rf"x.*expected the rows \[3, 3\] of .*, found {found} rows"):
        CanonicalTensors.of_target(stored, both("weight", spec(TensorRole.LINEAR, 3, 4)), "x")


@pytest.mark.parametrize(
    ("ties_head", "has_head", "rows", "is_borrowed"),
    [(True, False, 8, True), (True, False, 6, False), (False, False, 8, False), (True, True, 8, False)],
)
def test_a_head_is_the_embedding_where_it_may_be(ties_head: bool, has_head: bool, rows: int, is_borrowed: bool) -> None:
    embedding, head = torch.ones(8, 4), torch.zeros(8, 4)
    specs = {EMBEDDING: spec(TensorRole.LINEAR, 8, 4), HEAD: spec(TensorRole.LINEAR, rows, 4)}
    stored = {EMBEDDING: embedding} | ({HEAD: head} if has_head else {})
    source = CanonicalTensors.of_draft(InMemoryTensors(stored), specs, "x", ties_head=ties_head)
    assert (HEAD in source.names()) is (is_borrowed or has_head)
    if HEAD in source.names():
        assert torch.equal(source.read(HEAD), embedding if is_borrowed else head)


def test_scales_may_be_stored_in_several_shapes() -> None:
    rows, one, matrix = (
        spec(TensorRole.FP8_SCALES, 3),
        spec(TensorRole.FP8_SCALES, 1),
        spec(TensorRole.FP8_SCALES, 3, 2),
    )
    assert [rows.takes(shape) for shape in ((3,), (3, 1), (1, 3), (), (2,))] == [True, True, False, False, False]
    assert [one.takes(shape) for shape in ((1,), (1, 1), (), (3,))] == [True, True, True, False]
    assert [matrix.takes(shape) for shape in ((3, 2), (3,), ())] == [True, False, False]
    assert (rows.num_elements, matrix.num_elements, matrix.num_bytes) == (3, 6, 24)
    assert not spec(TensorRole.LINEAR, 3).takes((3, 1))
