"""Draft tokens on their way from the draft's process to the target's, while the engine plans the verify of them.

A draft that leaves its tokens on its device has answered before it has drawn them (docs/decisions/0016). Here a thread
of its process waits for them and puts them on a board: a few hundred bytes of memory that the target's process has
mapped. The target looks there when a verify asks for them. Both processes may be killed at any time: a target that
waits for a draft that has died goes on without its tokens, and the memory goes when both are gone.
"""

import json
import logging
import mmap
import os
import secrets
import threading
import time
from queue import SimpleQueue
from typing import Any

import numpy as np
import torch

from kimi_backend.serving.processes import is_alive
from kimi_backend.types.plan import PLACEHOLDER_TOKEN_ID, TokenHandle
from kimi_kernels.sampling_inputs import STATUS_NOT_FINITE

logger = logging.getLogger("kimi_backend.serving")

LONGEST_WAIT_S = 10.0
"""A target waits no longer for a draft that lives."""
_SPIN_S = 0.02 if len(os.sched_getaffinity(0)) >= 8 else 0.0
"""A step of this length is waited for without sleeping where cores are to spare: a sleep ends 50 us late."""
_SLEEP_S = 0.00005
_LONG_S = 0.02
_LONG_SLEEP_S = 0.001
_LOOK_S = 0.05
"""So often a waiting target looks whether the draft lives."""
_HEADER_BYTES = 64
_NO_STAMP = -1


def _map(descriptor: int, shape: tuple[int, int]) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """[stamp, the board's own number] int64, and the tokens, `shape` int32."""
    memory = mmap.mmap(descriptor, _HEADER_BYTES + 4 * shape[0] * shape[1])
    header = np.frombuffer(memory, np.int64, 2)
    return header, np.frombuffer(memory, np.int32, shape[0] * shape[1], _HEADER_BYTES).reshape(shape)


class TokenWriter:
    """The draft's end."""

    def __init__(self, shape: tuple[int, int]) -> None:
        """shape: [1 + longest proposal, most sequences], of the array that the draft leaves (`types.plan.TokenHandle`).

        Raises:
            OSError: no memory to share.
        """
        self._descriptor = os.memfd_create("kimi_draft_tokens")
        os.ftruncate(self._descriptor, _HEADER_BYTES + 4 * shape[0] * shape[1])
        self._header, self._tokens = _map(self._descriptor, shape)
        self._header[:] = _NO_STAMP, secrets.randbits(62)
        self._posted: SimpleQueue[tuple[int, int, torch.Tensor, Any] | None] = SimpleQueue()
        self._host: torch.Tensor | None = None
        self._num_posted = 0
        self._thread = threading.Thread(target=self._run, name="kimi-tokens", daemon=True)
        self._thread.start()

    @property
    def handle(self) -> bytes:
        """By which another process of this user opens it."""
        return json.dumps(
            {
                "process_id": os.getpid(),
                "descriptor": self._descriptor,
                "shape": self._tokens.shape,
                "number": int(self._header[1]),
            }
        ).encode()

    def post(self, left: torch.Tensor, num_seqs: int) -> TokenHandle:
        """Show the first columns of `left`, once its device has written them. Does not wait.

        Args:
            left: int32 of this writer's shape.
        """
        self._num_posted += 1
        event = None
        if left.is_cuda:
            if self._host is None:
                self._host = torch.empty(left.shape, dtype=torch.int32, pin_memory=True)
            self._host.copy_(left, non_blocking=True)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
        self._posted.put((self._num_posted, num_seqs, left if self._host is None else self._host, event))
        return TokenHandle(num_seqs=num_seqs, region=self._num_posted)

    def close(self) -> None:
        """End the thread and give the memory up."""
        self._posted.put(None)
        self._thread.join()
        os.close(self._descriptor)

    def _run(self) -> None:
        while (posted := self._posted.get()) is not None:
            stamp, num_seqs, host, event = posted
            try:
                self._wait(event)
                self._tokens[:, :num_seqs] = host[:, :num_seqs].numpy()
            except Exception:
                logger.exception("the draft's step failed after its answer")
                self._tokens[:] = PLACEHOLDER_TOKEN_ID
                self._tokens[0] = STATUS_NOT_FINITE
            self._header[0] = stamp  # last: who sees it sees what stands above it

    def _wait(self, event: Any) -> None:
        if event is not None:
            event.synchronize()


class TokenReader:
    """The target's end: one draft's board at a time."""

    def __init__(self) -> None:
        self._opened: bytes | None = None
        self._process_id = 0
        self._header = np.empty(0, np.int64)
        self._tokens = np.empty((0, 0), np.int32)

    def open(self, handle: bytes | None) -> bytes | None:
        """Map a draft's board in place of the one before. Returns the handle that is open now, or None."""
        if handle == self._opened:
            return handle
        self._opened = None
        if handle is None:
            return None
        try:
            fields = json.loads(handle)
            self._process_id, shape = int(fields["process_id"]), (int(fields["shape"][0]), int(fields["shape"][1]))
            descriptor = os.open(f"/proc/{self._process_id}/fd/{int(fields['descriptor'])}", os.O_RDWR)
            try:
                self._header, self._tokens = _map(descriptor, shape)
            finally:
                os.close(descriptor)
            if self._header[1] != int(fields["number"]):
                raise ValueError("its process has it no more")
        except (OSError, ValueError, LookupError, TypeError) as error:
            logger.warning("the draft's tokens are waited for in its calls: its board cannot be opened: %s", error)
            return None
        self._opened = handle
        return handle

    def take(self, handle: TokenHandle, num_rows: int) -> TokenHandle:
        """The tokens that a plan names, as an array of this process. Waits until they are there.

        What never comes is no token: the status says that every sequence failed.

        Args:
            num_rows: of the array that is needed at least.
        """
        fits = self._tokens.shape[0] >= num_rows and self._tokens.shape[1] >= handle.num_seqs
        if self._opened is not None and fits and self._is_shown(handle.region):
            tokens = self._tokens[:, : handle.num_seqs].copy()
        else:
            logger.warning("tokens of the draft did not come (stamp %s)", handle.region)
            tokens = np.full((num_rows, handle.num_seqs), PLACEHOLDER_TOKEN_ID, np.int32)
            tokens[0] = STATUS_NOT_FINITE
        return TokenHandle(num_seqs=handle.num_seqs, tensor=torch.from_numpy(tokens))

    def _is_shown(self, stamp: int | None) -> bool:
        start = now = time.perf_counter()
        next_look = start + _LOOK_S
        while self._header[0] != stamp:
            now = time.perf_counter()
            if now > next_look:
                if now > start + LONGEST_WAIT_S or not is_alive(self._process_id):
                    return False
                next_look = now + _LOOK_S
            if now < start + _SPIN_S:
                os.sched_yield()
            else:
                time.sleep(_SLEEP_S if now < start + _LONG_S else _LONG_SLEEP_S)
        return True
