"""Several asynchronous iterators as one."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import TypeVar

T = TypeVar("T")


async def merged(iterators: Sequence[AsyncIterator[T]]) -> AsyncIterator[T]:
    """Give what they give, as it comes; each is asked for more only when its last item was taken.

    Raises:
        Exception: the first that one of them raises; the others are asked for nothing more.
    """
    if len(iterators) == 1:
        async for item in iterators[0]:
            yield item
        return
    waiting = {asyncio.ensure_future(_next(iterator)): iterator for iterator in iterators}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                iterator = waiting.pop(task)
                if (found := task.result()) is not None:
                    yield found[0]
                    waiting[asyncio.ensure_future(_next(iterator))] = iterator
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


async def _next(iterator: AsyncIterator[T]) -> tuple[T] | None:
    async for item in iterator:
        return (item,)
    return None
