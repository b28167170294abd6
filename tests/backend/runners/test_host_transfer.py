import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kimi_backend.runners.host_transfer import to_device, to_host

CPU = torch.device("cpu")
DTYPES = [np.int32, np.int64, np.float32, np.bool_]


@st.composite
def named_arrays(draw: st.DrawFn) -> dict[str, np.ndarray]:
    random = np.random.default_rng(draw(st.integers(0, 2**31)))
    arrays = {}
    for index in range(draw(st.integers(1, 6))):
        shape = tuple(draw(st.lists(st.integers(0, 5), max_size=3)))
        arrays[f"array {index}"] = random.integers(0, 2, shape).astype(draw(st.sampled_from(DTYPES)))
    return arrays


@settings(max_examples=60, deadline=None)
@given(named_arrays())
def test_arrays_come_back_as_they_went(arrays: dict[str, np.ndarray]) -> None:
    tensors = to_device(arrays, CPU)
    back = to_host(tensors)
    for name, array in arrays.items():
        assert tuple(tensors[name].shape) == array.shape
        assert back[name].dtype == array.dtype
        np.testing.assert_array_equal(back[name], array)


def test_a_strided_array_is_copied_in_order() -> None:
    array = np.arange(24, dtype=np.int64).reshape(4, 6)[:, ::2]
    assert to_device({"array": array}, CPU)["array"].tolist() == array.tolist()


def test_a_dtype_that_no_plan_has_is_refused() -> None:
    with pytest.raises(KeyError, match="float64"):
        to_device({"array": np.zeros(3, np.float64)}, CPU)
