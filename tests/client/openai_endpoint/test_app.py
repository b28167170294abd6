"""A reply of the endpoint holds what its request took until it ends, whichever way."""

import asyncio
from contextlib import contextmanager
from typing import Any

import pytest
from starlette.responses import Response

from kimi_openai.app import _EndsWith


@pytest.mark.parametrize("error", [None, ConnectionResetError("the client has gone")])
def test_a_reply_leaves_its_context_when_it_ends(error: Exception | None) -> None:
    told: list[Any] = []

    @contextmanager
    def request_under_way() -> Any:
        try:
            yield
        except ConnectionResetError as seen:
            told.append(seen)
            raise
        finally:
            told.append("left")

    class Reply(Response):
        async def __call__(self, *_: Any) -> None:
            told.append("sent")
            if error is not None:
                raise error

    context = request_under_way()
    context.__enter__()
    reply = _EndsWith(Reply(), context)
    if error is None:
        asyncio.run(reply({}, None, None))  # type: ignore[arg-type]
    else:
        with pytest.raises(ConnectionResetError):
            asyncio.run(reply({}, None, None))  # type: ignore[arg-type]
    assert told == ["sent", *[error] * (error is not None), "left"]
