"""Plans and replies survive the border bit for bit; foreign bytes are refused."""

import dataclasses
import types
import typing

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kimi_backend.errors import InvalidRequestError
from kimi_backend.types import codec
from kimi_backend.types.plan import (
    AuxHandle,
    DraftPlan,
    DraftReply,
    RowPlan,
    SamplingPlan,
    TargetPlan,
    TargetReply,
)
from kimi_backend.types.scoring import ScoringPlan, TokenScores

MESSAGES = [TargetPlan, TargetReply, DraftPlan, DraftReply]


def random_message(cls: type, rng: np.random.Generator) -> typing.Any:
    values: dict[str, typing.Any] = {}
    hints = typing.get_type_hints(cls)
    for name in (field.name for field in dataclasses.fields(cls)):
        annotation = hints[name]
        options = [a for a in typing.get_args(annotation) if a is not type(None)]
        optional = type(None) in typing.get_args(annotation)
        kind = options[0] if optional else annotation
        if kind is typing.Any:  # stays in its process
            continue
        if optional and rng.random() < 0.5:
            values[name] = None
        elif kind is int:
            values[name] = int(rng.integers(-(2**62), 2**62))
        elif kind is bool:
            values[name] = bool(rng.integers(2))
        elif kind is AuxHandle:
            values[name] = AuxHandle(region=3)
        elif kind in (RowPlan, SamplingPlan, ScoringPlan, TokenScores):
            values[name] = random_message(kind, rng)
        else:
            dtype = codec._array_dtype(kind)
            shape = tuple(rng.integers(0, 6, size=rng.integers(1, 4)))
            values[name] = rng.integers(0, 2**31 - 1, size=shape).astype(dtype)
    return cls(**values)


def assert_equal(left: typing.Any, right: typing.Any) -> None:
    for field in dataclasses.fields(left):
        a, b = getattr(left, field.name), getattr(right, field.name)
        if isinstance(a, np.ndarray):
            assert a.dtype == b.dtype and a.shape == b.shape, field.name
            np.testing.assert_array_equal(a, b)
        elif dataclasses.is_dataclass(a):
            assert_equal(a, b)
        else:
            assert a == b, field.name


@pytest.mark.parametrize("cls", MESSAGES)
@given(seed=st.integers(0, 2**32 - 1))
def test_round_trip(cls, seed):
    message = random_message(cls, np.random.default_rng(seed))
    assert_equal(message, codec.decode(cls, codec.encode(message)))


def test_what_is_the_same_from_step_to_step_is_packed_and_unpacked_once():
    rng = np.random.default_rng(0)
    first, other = random_message(DraftPlan, rng), random_message(DraftPlan, rng)
    second = dataclasses.replace(other, sampling=first.sampling)
    packed = [codec.encode(plan) for plan in (first, second, other)]
    decoded = [codec.decode(DraftPlan, buffer) for buffer in packed]
    for plan, found in zip((first, second, other), decoded, strict=True):
        assert_equal(plan, found)
    assert decoded[0].sampling is decoded[1].sampling
    assert decoded[0].sampling is not decoded[2].sampling
    packed[0][:] = 0  # what is kept is not a view of what arrived
    assert_equal(first.sampling, decoded[1].sampling)
    assert not decoded[0].sampling.temperature.flags.writeable


def test_equal_parameters_of_another_object_are_packed_anew():
    plan = random_message(TargetPlan, np.random.default_rng(0))
    again = dataclasses.replace(plan, sampling=dataclasses.replace(plan.sampling, top_k=plan.sampling.top_k + 1))
    codec.encode(plan)
    assert_equal(again, codec.decode(TargetPlan, codec.encode(again)))


def test_non_contiguous_arrays_are_packed_by_value():
    reply = random_message(DraftReply, np.random.default_rng(0))
    wide = np.arange(24, dtype=np.int64).reshape(4, 6)
    reply = dataclasses.replace(reply, draft_token_ids=wide[::2, ::3])
    np.testing.assert_array_equal(codec.decode(DraftReply, codec.encode(reply)).draft_token_ids, wide[::2, ::3])


def test_foreign_bytes_are_refused():
    buffer = codec.encode(random_message(DraftReply, np.random.default_rng(0)))
    with pytest.raises(InvalidRequestError, match="bytes given"):
        codec.decode(DraftReply, buffer[:8])
    with pytest.raises(InvalidRequestError, match="its header is not one of"):
        codec.decode(TargetReply, buffer)
    for length in range(16, buffer.nbytes, 8):
        with pytest.raises(InvalidRequestError, match="do not hold a DraftReply"):
            codec.decode(DraftReply, buffer[:length])
    buffer[0] ^= 1
    with pytest.raises(InvalidRequestError, match="not one of this version"):
        codec.decode(DraftReply, buffer)


@pytest.mark.parametrize("cls", MESSAGES)
def test_only_what_may_be_none_may_be_missing(cls):
    """Each field's header says in turn that it is absent, or has a dimension too many, or a negative size."""
    message, hints = random_message(cls, np.random.default_rng(1)), typing.get_type_hints(cls)
    whole, num_fields = codec.encode(message), len(codec._leaves(cls))
    for index, (path, field) in enumerate(codec._leaves(cls)):
        if field.nested is None and "." not in path:
            assert field.is_optional == (type(None) in typing.get_args(hints[path])), path
        for word, value, problem in (
            (0, -1, "is missing"),
            (0, 4, "has another number"),
            (1, -1, "has a negative size"),
        ):
            buffer = whole.copy()
            words = buffer[: 8 * (2 + 4 * num_fields)].view(np.int64)
            if (word, value) == (0, -1) and field.is_optional:
                continue
            if word == 1 and words[2 + 4 * index] < 1:
                continue
            words[2 + 4 * index + word] = value
            with pytest.raises(InvalidRequestError, match=f"do not hold a {cls.__name__}: {field.name} {problem}"):
                codec.decode(cls, buffer)


def test_array_fields_are_found_under_both_forms_of_numpys_alias(monkeypatch):
    """numpy 2.5 made NDArray an alias of its own, with the scalar as its one argument."""

    class Alias:
        def __class_getitem__(cls, scalar):
            return types.GenericAlias(cls, (scalar,))

    assert codec._array_dtype(npt.NDArray[np.int32]) == np.int32
    monkeypatch.setattr(codec.npt, "NDArray", Alias)
    assert codec._array_dtype(Alias[np.float32]) == np.float32
    assert codec._array_dtype(int) is codec._array_dtype(list[int]) is None
