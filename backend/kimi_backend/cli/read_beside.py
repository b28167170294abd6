"""Reads a reply on a thread of its own, for programs that Ctrl-C may interrupt at any moment.

Python raises KeyboardInterrupt in the main thread, wherever that is. Within gRPC it would leave locks taken, and every
later request over the same connection would wait for them for ever.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue

from kimi_client import Chunk, Completion, Stream


class Reply:
    """A reply that another thread reads: iterate over its chunks, then ask for the whole of it."""

    def __init__(self, start: Callable[[], Stream]) -> None:
        self._start = start
        self._stream: Stream | None = None
        self._is_left = False
        self._read: SimpleQueue[Chunk | Completion | BaseException] = SimpleQueue()
        self._completion: Completion | None = None
        self.thread = threading.Thread(target=self._run, name="kimi-reply", daemon=True)

    def __iter__(self) -> Iterator[Chunk]:
        """Chunks as they arrive.

        Raises:
            KimiClientError: as the stream does.
        """
        while not isinstance(read := self._read.get(), Completion):
            if isinstance(read, BaseException):
                raise read
            yield read
        self._completion = read

    @property
    def completion(self) -> Completion:
        """All of it, once the chunks have been read."""
        assert self._completion is not None
        return self._completion

    def leave(self) -> None:
        """End the request, if it has not ended; returns at once."""
        self._is_left = True  # seen with the next chunk, should Ctrl-C come before the next line
        threading.Thread(target=self._cancel, name="kimi-leave", daemon=True).start()

    def _cancel(self) -> None:
        if self._stream is not None:
            self._stream.cancel()

    def _run(self) -> None:
        try:
            with self._start() as stream:
                self._stream = stream
                if not self._is_left:
                    self._hand_over(stream)
        except BaseException as error:
            self._read.put(error)

    def _hand_over(self, stream: Stream) -> None:
        for chunk in stream:
            self._read.put(chunk)
            if self._is_left:
                return
        self._read.put(stream.result())


@contextmanager
def read_beside(start: Callable[[], Stream]) -> Iterator[Reply]:
    """Send a request and read its reply on another thread; leaving the block ends it.

    Args:
        start: sends it, on that thread.
    """
    reply = Reply(start)
    try:
        reply.thread.start()
        yield reply
    finally:
        reply.leave()
