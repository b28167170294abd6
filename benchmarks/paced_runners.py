"""Runners that compute nothing behind the real server: they sleep as long as they are told and answer at random.

What is left of a round is the server's: `server_overhead.py --paced TARGET_MS DRAFT_MS` needs no GPU, and two cores are
enough. Sleeping lets go of the interpreter and of the core, as a process that waits for its GPU does. A thread in which
a step's sleep is queued stands for the stream: target and draft follow each other on it as on a GPU.
"""

import dataclasses
import os
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import torch

from engine_overhead import InstantDraft, InstantTarget
from kimi_backend.config.settings import ServingSettings
from kimi_backend.serving import board_sides
from kimi_backend.serving.board_order import HostOrder
from kimi_backend.serving.boundary import forward_logs
from kimi_backend.serving.descriptions import model_parameters
from kimi_backend.serving.runner_secret import read_secret
from kimi_backend.serving.runner_server import RunnerServer
from kimi_backend.serving.step_board import StepBoard
from kimi_backend.spec_decode.protocols import OnQueued
from kimi_backend.types.plan import (
    AuxHandle,
    DraftPlan,
    DraftReply,
    DrawnHandle,
    RunnerDescription,
    TargetPlan,
    TargetReply,
    TokenHandle,
)

LONGEST_PROPOSAL, MOST_SEQUENCES = 7, 256
AUX_BUFFER = b"paced"
"""In place of a handle: the draft "opens" it, and no aux tensor travels, as on one GPU."""

MODEL = """
import sys
sys.path.insert(0, {folder!r})
from paced_runners import make_server


class TritonPythonModel:
    def initialize(self, args):
        self.server = make_server(args, {role!r}, {wait_s}, {vocab_size})

    def execute(self, requests):
        return self.server.run(requests)
"""


def write_model(folder: Path, config: Path, role: str, wait_s: float, vocab_size: int) -> None:
    """A model of the repository that takes a runner's place, with that runner's own config.pbtxt."""
    (folder / "1").mkdir(parents=True)
    (folder / "config.pbtxt").symlink_to(config.resolve())
    values = {"folder": str(Path(__file__).parent), "role": role, "wait_s": wait_s, "vocab_size": vocab_size}
    (folder / "1/model.py").write_text(MODEL.format(**values))


class PacedStream:
    """Does what is queued, in order."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[Callable[[], None]] = SimpleQueue()
        threading.Thread(target=self._run, name="paced-stream", daemon=True).start()

    def queue(self, work: Callable[[], None]) -> None:
        self._queue.put(work)

    def mark(self) -> threading.Event:
        """Set when all that was queued is done."""
        done = threading.Event()
        self.queue(done.set)
        return done

    def synchronize(self) -> None:
        self.mark().wait()

    def _run(self) -> None:
        while True:
            self._queue.get()()


class PacedOrder(HostOrder):
    """In a stream's order."""

    def __init__(self, board: StepBoard, stream: PacedStream) -> None:
        super().__init__(board)
        self._stream = stream

    def wait(self, word: int, value: int) -> None:
        self._stream.queue(partial(super().wait, word, value))

    def write(self, word: int, value: int) -> None:
        self._stream.queue(partial(super().write, word, value))

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self._stream.queue(partial(super().copy, target, source))


class PacedDraft:
    """Where it may leave its tokens, it answers at once and is `wait_s` behind, as a draft on a GPU."""

    left_shape = (LONGEST_PROPOSAL + 1, MOST_SEQUENCES)

    def __init__(self, instant: InstantDraft, wait_s: float, stream: PacedStream) -> None:
        self._instant, self._wait_s, self._stream = instant, wait_s, stream
        self._left = torch.zeros(self.left_shape, dtype=torch.int32)
        self.describe = instant.describe

    def propose(self, plan: DraftPlan) -> DraftReply:
        if plan.leaves_tokens:
            return self.follow(plan)
        self._stream.queue(partial(time.sleep, self._wait_s))
        self._stream.synchronize()
        return self._instant.propose(plan)

    def follow(self, plan: DraftPlan) -> DraftReply:
        description, random = self._instant.description, self._instant.random
        num_seqs = len(plan.num_proposals)
        drawn = random.integers(1000, description.vocab_size, (LONGEST_PROPOSAL, num_seqs), np.int32)
        self._left[1:, :num_seqs] = torch.from_numpy(drawn)
        self._stream.queue(partial(time.sleep, self._wait_s))
        return DraftReply(
            step_id=plan.step_id,
            runner_epoch=description.runner_epoch,
            seq_status=np.zeros(num_seqs, np.int32),
            draft_token_ids=np.empty((0, 0), np.int64),
            tokens=TokenHandle(num_seqs=num_seqs, tensor=self._left),
        )


@dataclasses.dataclass(frozen=True, slots=True)
class PacedPending:
    """A step whose work is queued."""

    reply: TargetReply
    done: threading.Event

    def wait(self) -> TargetReply:
        self.done.wait()
        return self.reply


class PacedTarget:
    """Repeats the status of a draft's step."""

    can_launch = True

    def __init__(self, instant: InstantTarget, wait_s: float, stream: PacedStream) -> None:
        self._instant, self._wait_s, self._stream = instant, wait_s, stream
        self._last_step_id = -1

    def describe(self) -> RunnerDescription:
        return dataclasses.replace(self._instant.describe(), queues_steps=True)

    def launch(self, plan: TargetPlan) -> PacedPending | None:
        if plan.drawn_rows is not None and self._last_step_id != plan.step_id - 1:
            return None
        self._last_step_id = plan.step_id
        self._stream.queue(partial(time.sleep, self._wait_s))
        return PacedPending(self._instant.answer(plan), self._stream.mark())

    def verify(self, plan: TargetPlan) -> TargetReply:
        return self.verify_ahead(plan, lambda aux, drawn: None)

    def verify_ahead(self, plan: TargetPlan, on_queued: OnQueued) -> TargetReply:
        self._stream.queue(partial(time.sleep, self._wait_s))
        reply = self._instant.verify(plan)
        tokens, accepted = map(torch.from_numpy, (reply.output_token_ids, reply.num_accepted_tokens))
        on_queued(reply.aux, DrawnHandle(output_token_ids=tokens, num_accepted_tokens=accepted))
        self._stream.synchronize()
        left = plan.draft_tokens
        status = None if left.tensor is None else left.tensor[0, : left.num_seqs].numpy()
        return dataclasses.replace(reply, draft_status=status)


class _NoReceiver:
    num_regions = 1

    def open(self, handle: bytes | None) -> bytes | None:
        return handle

    def resolve(self, aux: AuxHandle, num_rows: int) -> torch.Tensor:
        return torch.empty(num_rows, 0)

    def close(self) -> None:
        return None


def make_server(args: dict[str, str], role: str, wait_s: float, vocab_size: int) -> Any:
    """A `RunnerServer` over a paced runner."""
    import triton_python_backend_utils as pb_utils

    settings = ServingSettings.from_parameters(model_parameters(args), os.environ)
    forward_logs(pb_utils, settings.log_level)
    stream = PacedStream()
    board_sides.order_of = lambda board, *_: PacedOrder(board, stream)  # type: ignore[attr-defined]
    runner: Any
    if role == "target":
        runner = PacedTarget(InstantTarget(settings.max_num_seqs, 0, vocab_size), wait_s, stream)
    else:
        runner = PacedDraft(InstantDraft(settings.max_num_seqs, 0, vocab_size), wait_s, stream)
    server: Any = RunnerServer(
        runner, pb_utils, secret=read_secret(os.environ), has_board=settings.step_board == "auto"
    )
    if role == "target":
        server._description = dataclasses.replace(server._description, aux_buffer=AUX_BUFFER)
    else:
        server._receiver = _NoReceiver()
    return server
