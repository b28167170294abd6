"""A thread that waits to do one thing at a time beside its caller. Starting one takes longer than a call's packing."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue

Job = Callable[[], None]


class SideThread:
    """Ends with the process."""

    def __init__(self, name: str) -> None:
        self._jobs: SimpleQueue[Job] = SimpleQueue()
        self._done: SimpleQueue[BaseException | None] = SimpleQueue()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    @contextmanager
    def running(self, job: Job) -> Iterator[None]:
        """The job runs beside the block, which ends when both have. Raises what the block raises, else what the job
        did."""
        self._jobs.put(job)
        try:
            yield
        finally:
            error = self._done.get()
        if error is not None:
            raise error

    def _run(self) -> None:
        while True:
            job = self._jobs.get()
            try:
                job()
            except BaseException as error:
                self._done.put(error)
            else:
                self._done.put(None)
