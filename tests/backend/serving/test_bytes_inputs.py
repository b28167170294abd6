"""BYTES tensors are decoded as Triton's own utilities do it, but for lists that are longer than any field may be."""

import struct
from types import SimpleNamespace

import numpy as np
import pytest

from kimi_backend.errors import InvalidRequestError
from kimi_backend.serving.bytes_inputs import MOST_BYTES, MOST_ELEMENTS, decode_bytes, limit_decoding
from kimi_backend.serving.incoming import copied_tensors
from support.fake_pb_utils import Tensor


def encoded(elements: list[bytes]) -> "np.ndarray[tuple[int], np.dtype[np.uint8]]":
    return np.frombuffer(b"".join(struct.pack("<I", len(e)) + e for e in elements), dtype=np.uint8)


@pytest.mark.parametrize(
    "elements", [[], [b""], [b"a"], [b"a", b"", "wörd".encode(), b"\0" * 300], [b"w"] * MOST_ELEMENTS]
)
def test_every_element_as_it_was_sent(elements: list[bytes]) -> None:
    decoded = decode_bytes(encoded(elements))
    assert decoded.dtype == np.object_
    assert decoded.reshape([1, len(elements)]).tolist() == [elements]


def test_a_list_that_no_field_may_have_is_counted_and_not_decoded() -> None:
    shape = [1, 500_000]
    array = decode_bytes(encoded([b"word"] * (MOST_ELEMENTS + 1))).reshape(shape)
    assert array.shape == (1, 500_000) and array.base.size == 1
    with pytest.raises(InvalidRequestError, match=r"^bad_words: 500000 elements given, at most 1024 are allowed$"):
        copied_tensors([Tensor("bad_words", array)])


@pytest.mark.parametrize("sizes", [[MOST_BYTES + 1], [MOST_BYTES, 1]])
def test_what_no_field_may_be_long_is_refused_before_it_is_copied(sizes: list[int]) -> None:
    memory = encoded([b"s" * size for size in sizes])
    *_, last = decode_bytes(memory)
    assert np.shares_memory(np.frombuffer(last, np.uint8), memory)
    with pytest.raises(InvalidRequestError, match=rf"^stop: {sum(sizes)} bytes given, at most 65536 are allowed$"):
        copied_tensors([Tensor("stop", decode_bytes(memory).reshape([1, len(sizes)]))])


def test_what_a_field_may_be_long_is_bytes() -> None:
    (text,) = decode_bytes(encoded([b"s" * MOST_BYTES]))
    assert type(text) is bytes and len(text) == MOST_BYTES


def test_what_is_decoded_is_no_longer_the_servers_memory() -> None:
    memory = encoded([b"abc", b"", b"de"]).copy()
    copied = copied_tensors([Tensor("stop", decode_bytes(memory).reshape([1, 3]))])["stop"]
    memory[:] = 0
    assert copied.tolist() == [[b"abc", b"", b"de"]]


def test_two_texts_where_one_is_allowed() -> None:
    with pytest.raises(InvalidRequestError, match=r"^text_input: 2 elements given, exactly 1 is allowed$"):
        copied_tensors([Tensor("text_input", decode_bytes(encoded([b"a", b"b"])).reshape([1, 2]))])


def test_the_servers_utilities_get_it() -> None:
    utilities = SimpleNamespace(deserialize_bytes_tensor=None)
    limit_decoding(utilities)
    assert utilities.deserialize_bytes_tensor is decode_bytes
