"""The HTTP client's side of a request: its body, and whether it is still there."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.requests import Request

from kimi_openai.errors import ApiError

MAX_BODY_BYTES = 16 * 2**20
"""Some ten times the longest prompt that any Kimi model takes, as token ids."""

T = TypeVar("T")


class ClientLeft(Exception):
    """Nobody waits for the reply any more."""


async def read_body(request: Request) -> bytes:
    """
    Raises:
        ApiError: 413, longer than MAX_BODY_BYTES; the rest is not read.
        ClientDisconnect: the client left before its end.
    """
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > MAX_BODY_BYTES:
            raise ApiError(413, f"the body has more than {MAX_BODY_BYTES} bytes, which are allowed")
    return bytes(body)


async def while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled when the client leaves. The request's body must have been read.

    Raises:
        ClientLeft: it did.
    """
    task, left = asyncio.create_task(work), asyncio.create_task(_disconnect(request))
    try:
        await asyncio.wait({task, left}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientLeft
        return task.result()
    finally:
        task.cancel()
        left.cancel()
        await asyncio.gather(task, left, return_exceptions=True)


async def _disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
