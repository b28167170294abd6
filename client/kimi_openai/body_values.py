"""The number of values that a body may hold, counted before it is parsed.

Parsing is one call in C, and checking types another, in which the event loop serves nobody: a second and more for a
body of millions of values. Counting goes on piece by piece, others in between.
"""

import asyncio
import re

from kimi_openai.errors import ApiError

MOST_ENTRIES = 2**15
"""Lists, objects and entries of objects together: 4,096 messages are three each, a tool some fifty. To parse so many
takes 13 ms."""
MOST_ELEMENTS = 2**19
"""Elements of lists together: the token ids of the longest prompt of any Kimi model, twice."""
SHORT_BYTES = MOST_ENTRIES
"""A body of so many has no more values: none takes less than one."""
PIECE_BYTES = 2**15
_NO_BACKSLASH = re.compile(rb"[^\\]")


async def check_values(body: bytes, piece_bytes: int = PIECE_BYTES) -> None:
    """
    Args:
        body: JSON; of anything else the counts mean nothing.

    Raises:
        ApiError: 400, it holds more values than it may.
    """
    num_entries = num_elements = start = 0
    is_text = False
    while start < len(body) and len(body) > SHORT_BYTES:
        end = _end_of_backslashes(body, start + piece_bytes) + 1  # never between one and what it escapes
        parts = body[start:end].replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
        outside = b"".join(parts[is_text::2])
        is_text ^= len(parts) % 2 == 0
        num_entries += sum(map(outside.count, (b"[", b"{", b":")))
        num_elements += outside.count(b",")
        for count, most, of_what in (
            (num_entries, MOST_ENTRIES, "lists, objects and entries of objects"),
            (num_elements, MOST_ELEMENTS, "elements of lists"),
        ):
            if count > most:
                raise ApiError(400, f"the body holds more than {most} {of_what}, which are allowed")
        start = end
        await asyncio.sleep(0)


def _end_of_backslashes(body: bytes, at: int) -> int:
    behind = _NO_BACKSLASH.search(body, at)
    return len(body) if behind is None else behind.start()
