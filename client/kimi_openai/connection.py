"""The HTTP client's side of a request: its body, and whether it is still there."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.requests import Request

from kimi_openai.connection_limits import FREE_BODY_BYTES, BodyBudget, ConnectionLimits
from kimi_openai.errors import ApiError

T = TypeVar("T")


class ClientLeft(Exception):
    """Nobody waits for the reply any more."""


async def read_body(request: Request, limits: ConnectionLimits, budget: BodyBudget) -> bytes:
    """
    Raises:
        ApiError: 413, longer than is allowed; 503, bodies of other requests have taken what there is.
        ClientDisconnect: the client left before its end, or was too slow.
    """
    too_long = ApiError(413, f"the body has more than {limits.max_body_bytes} bytes, which are allowed")
    announced = request.headers.get("content-length", "")
    if "expect" in request.headers and announced.isdecimal() and int(announced) > limits.max_body_bytes:
        raise too_long  # and its client does not send it
    body = bytearray()
    refusal = None
    num_taken = num_drained = 0
    try:
        async for piece in request.stream():
            if refusal is None and len(body) + len(piece) > limits.max_body_bytes:
                refusal = too_long
            count = min(len(piece), max(0, len(body) + len(piece) - FREE_BODY_BYTES))
            if refusal is None:
                try:
                    budget.take(count)
                except ApiError as error:
                    refusal = error
            if refusal is None:
                num_taken += count
                body += piece
                continue
            body.clear()
            budget.give_back(num_taken)
            num_taken = 0
            num_drained += len(piece)
            if num_drained > limits.max_drained_bytes:
                break
    finally:
        budget.give_back(num_taken)
    if refusal is not None:
        raise refusal
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
