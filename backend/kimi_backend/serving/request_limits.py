"""The largest size of each field of a request, asked before any of its work: decoding, parsing, rendering, tokenising.

Otherwise what is refused later for its length costs Triton Server's thread, and with it every new request, seconds.
"""

from collections.abc import Iterable, Sized
from dataclasses import dataclass

from kimi_backend.errors import InvalidRequestError
from kimi_backend.serving.request_fields import ALIASES, INPUT_FIELDS

KIB, MIB = 2**10, 2**20


@dataclass(frozen=True, slots=True)
class FieldLimit:
    """The most of a field; None: not limited here."""

    num_bytes: int | None = None
    """Bytes of all its texts together, or of its JSON."""
    num_items: int | None = None
    """Elements of a list, entries of a JSON list or object."""


LIMITS = {
    "text_input": FieldLimit(num_bytes=8 * MIB),
    "messages": FieldLimit(num_bytes=8 * MIB, num_items=4096),
    "input_ids": FieldLimit(num_items=2 * MIB),
    "logit_bias": FieldLimit(num_bytes=MIB, num_items=16_384),
    "allowed_token_ids": FieldLimit(num_items=MIB),
    "stop_token_ids": FieldLimit(num_items=4096),
    "stop_control_tokens": FieldLimit(num_bytes=64 * KIB, num_items=1024),
    "bad_words": FieldLimit(num_bytes=64 * KIB, num_items=1024),
    "stop": FieldLimit(num_bytes=64 * KIB, num_items=1024),
    "tools": FieldLimit(num_bytes=MIB, num_items=1024),
    "response_format": FieldLimit(num_bytes=256 * KIB, num_items=16),
    "structured_outputs": FieldLimit(num_bytes=256 * KIB, num_items=16),
    "tool_choice": FieldLimit(num_bytes=4 * KIB, num_items=16),
    "chat_template_kwargs": FieldLimit(num_bytes=64 * KIB, num_items=1024),
    "sampling_parameters": FieldLimit(num_bytes=8 * MIB, num_items=1024),
    "proposer": FieldLimit(num_bytes=KIB),
    "cache_salt": FieldLimit(num_bytes=KIB),
}
"""Fields that may be long; an alias has its field's."""


_LISTS = frozenset(field.name for field in INPUT_FIELDS if field.kind.is_list)


def limit_of(name: str) -> FieldLimit:
    """The limit of a field, by any of its names."""
    return LIMITS.get(ALIASES.get(name, name), FieldLimit())


def check_bytes(name: str, texts: Iterable[Sized]) -> None:
    """
    Raises:
        InvalidRequestError: they are longer together than the field may be. Characters count as a byte each.
    """
    most = limit_of(name).num_bytes
    if most is not None and (num_bytes := sum(map(len, texts))) > most:
        raise InvalidRequestError(f"{name}: {num_bytes} bytes given, at most {most} are allowed")


def check_elements(name: str, count: int) -> None:
    """
    Raises:
        InvalidRequestError: an input tensor of the field may not have so many elements.
    """
    if name in _LISTS:
        check_items(name, count)
    elif count != 1:
        raise InvalidRequestError(f"{name}: {count} elements given, exactly 1 is allowed")


def check_items(name: str, count: int) -> None:
    """
    Raises:
        InvalidRequestError: they are more than the field may have.
    """
    most = limit_of(name).num_items
    if most is not None and count > most:
        raise InvalidRequestError(f"{name}: {count} elements given, at most {most} are allowed")
