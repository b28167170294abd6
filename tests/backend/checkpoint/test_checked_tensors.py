"""Bad values are refused when they are read; roles whose values may be anything are not looked at."""

import pytest
import torch

from kimi_backend.checkpoint.checked_tensors import CheckedTensors, check_values, value_problems
from kimi_backend.checkpoint.tensor_source import InMemoryTensors
from kimi_backend.checkpoint.tensor_spec import TensorRole, TensorSpec
from kimi_backend.errors import CheckpointError


def spec(role: TensorRole, *, matrix_shape: tuple[int, int] | None = None) -> TensorSpec:
    return TensorSpec(role=role, shape=(2,), dtypes=(torch.float32,), matrix_shape=matrix_shape)


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn])
@pytest.mark.parametrize(
    ("role", "values", "message"),
    [
        (TensorRole.NORM, [1.0, -1.0], None),
        (TensorRole.NORM, [], None),
        (TensorRole.NORM, [1.0, NAN], "expected finite values, found 1 NaN or infinite"),
        (TensorRole.FP8_SCALES, [0.0, 2.0], None),
        (TensorRole.FP8_SCALES, [-0.5, 2.0], "expected scales of at least 0, found -0.5"),
        (TensorRole.DRAFT_TO_TARGET, [NAN, NAN], None),
    ],
)
def test_values_by_role(dtype: torch.dtype, role: TensorRole, values: list[float], message: str | None) -> None:
    found = value_problems("x", spec(role), torch.tensor(values).to(dtype))
    assert found == ([] if message is None else [f"x: {message}"])


def test_both_infinities_are_counted() -> None:
    found = value_problems("x", spec(TensorRole.BIAS), torch.tensor([INF, 0.0, -INF]))
    assert found == ["x: expected finite values, found 2 NaN or infinite"]


@pytest.mark.parametrize(("stored", "is_wrong"), [([4, 8], False), ([8, 4], True)])
def test_a_stored_shape_is_that_of_the_matrix(stored: list[int], is_wrong: bool) -> None:
    of_shape = spec(TensorRole.INT4_SHAPE, matrix_shape=(4, 8))
    assert bool(value_problems("x", of_shape, torch.tensor(stored))) is is_wrong


@pytest.mark.parametrize(
    ("exponents", "message"),
    [
        ([0, 128], None),
        ([], None),
        ([129, 1], "expected scales of at most 2, found 2 ** 2"),
        ([255, 255], "expected finite values, found 2 NaN"),
    ],
)
def test_scales_that_are_exponents(exponents: list[int], message: str | None) -> None:
    found = value_problems("x", spec(TensorRole.MXFP4_SCALES), torch.tensor(exponents, dtype=torch.uint8))
    assert found == ([] if message is None else [f"x: {message}"])


def test_a_source_refuses_what_it_reads() -> None:
    source = InMemoryTensors({"good": torch.ones(2), "bad": torch.tensor([1.0, NAN]), "other": torch.tensor([NAN])})
    specs = {name: spec(TensorRole.NORM) for name in ("good", "bad")}
    checked = CheckedTensors(source, specs, "the draft")
    assert torch.equal(checked.read("good"), torch.ones(2))
    assert torch.equal(checked.read("bad", 0, 0, 1), torch.ones(1))
    assert checked.read("other").isnan().all()
    with pytest.raises(CheckpointError, match=r"the draft.*bad: expected finite values"):
        checked.read("bad")
    assert check_values(specs, source) == ["bad: expected finite values, found 1 NaN or infinite"]
