"""BYTES inputs are decoded no further than any field may be long.

Triton's Python backend decodes them with a Python function of its utilities, element by element, on the one thread that
takes requests: for a list of 500,000 texts no other request is taken for 0.3 s, for a text of 20 MB for 16 ms. It looks
that function up for each tensor, so `limit_decoding` puts this module's in its place. A server that decodes otherwise
loses the bound, no more.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from kimi_backend.serving.request_fields import INPUT_FIELDS, Kind
from kimi_backend.serving.request_limits import limit_of

MOST_ELEMENTS = max(limit_of(field.name).num_items or 1 for field in INPUT_FIELDS if field.kind is Kind.TEXTS)
"""A tensor of more is refused by its number of elements, whichever field it is."""
MOST_BYTES = max(limit_of(field.name).num_bytes or 0 for field in INPUT_FIELDS)
"""A tensor of more is refused by its size, and not copied."""
_LENGTH_BYTES = 4


def limit_decoding(pb_utils: Any) -> None:
    """Give Triton's Python utilities `decode_bytes` for their own function."""
    pb_utils.deserialize_bytes_tensor = decode_bytes


def decode_bytes(encoded: Any) -> Any:
    """The elements of a BYTES tensor, each behind its length (uint32, little-endian).

    Args:
        encoded: uint8 [bytes].

    Returns:
        object [elements] of `bytes`, but past MOST_BYTES views of `encoded`; for more than MOST_ELEMENTS what only has
        a `reshape`, to empty ones.
    """
    elements: list[bytes | memoryview] = []
    buffer, at, num_bytes = memoryview(encoded), 0, 0
    while at < len(buffer):
        if len(elements) == MOST_ELEMENTS:
            return _Undecoded()
        begin = at + _LENGTH_BYTES
        at = begin + int.from_bytes(buffer[at:begin], "little")
        num_bytes += at - begin
        elements.append(bytes(buffer[begin:at]) if num_bytes <= MOST_BYTES else buffer[begin:at])
    return np.fromiter(elements, np.object_, len(elements))  # np.array would look into the views


class _Undecoded:
    @staticmethod
    def reshape(shape: Sequence[int]) -> Any:
        return np.broadcast_to(np.array(b"", dtype=np.object_), shape)
