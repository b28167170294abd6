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

from engine_overhead import Answered, InstantDraft, InstantTarget
from kimi_backend.config.settings import ServingSettings
from kimi_backend.runners.hand_over import step_sync
from kimi_backend.runners.hand_over.order import HostOrder
from kimi_backend.runners.hand_over.semaphores import SharedSemaphores
from kimi_backend.runners.hand_over.token_table import TokenTable
from kimi_backend.runners.plan_checks import RunnerLimits
from kimi_backend.runners.ranks.workers import NO_WORKERS
from kimi_backend.serving.descriptions import model_parameters
from kimi_backend.serving.draft_server import DraftServer
from kimi_backend.serving.runner_secret import read_secret
from kimi_backend.serving.target_server import TargetServer
from kimi_backend.serving.triton_errors import forward_logs
from kimi_backend.types.plan import AuxHandle, DraftPlan, DraftReply, RunnerDescription, TargetPlan, TargetReply
from kimi_kernels.token_table import PROPOSALS, STATUS, stamp_of

AUX_BUFFER = b"paced"
"""The stand-in for a handle: the draft "opens" it, and no aux tensor travels, as on one GPU."""

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
    """Steps in a stream's order."""

    def __init__(self, semaphores: SharedSemaphores, stream: PacedStream) -> None:
        super().__init__(semaphores)
        self._stream = stream

    def wait(self, word: int, value: int) -> None:
        self._stream.queue(partial(super().wait, word, value))

    def write(self, word: int, value: int) -> None:
        self._stream.queue(partial(super().write, word, value))

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self._stream.queue(partial(super().copy, target, source))


@dataclasses.dataclass(frozen=True, slots=True)
class PacedPending:
    """A step whose work is queued."""

    finish: Callable[[], TargetReply]
    done: threading.Event

    def wait(self) -> TargetReply:
        self.done.wait()
        return self.finish()


class PacedRunner:
    """The common part of both: a stream, and a token table."""

    device, workers = torch.device("cpu"), NO_WORKERS

    def __init__(self, max_num_seqs: int, wait_s: float, stream: PacedStream) -> None:
        limits = RunnerLimits(max_num_batched_tokens=1, max_num_seqs=max_num_seqs, max_model_len=1)
        self.table = TokenTable.allocate(limits, self.device, is_split=True)
        self._wait_s, self._stream = wait_s, stream

    def close(self) -> None:
        return None

    def work(self) -> None:
        """Queue what a step takes."""
        self._stream.queue(partial(time.sleep, self._wait_s))


class PacedDraft(PacedRunner):
    """A draft that, where it may leave its tokens, answers at once and is `wait_s` behind, as one on a GPU."""

    depth = 1

    def __init__(self, instant: InstantDraft, wait_s: float, stream: PacedStream) -> None:
        super().__init__(instant.description.max_num_seqs, wait_s, stream)
        self._instant = instant

    def describe(self) -> RunnerDescription:
        return dataclasses.replace(self._instant.describe(), depth=self.depth)

    def launch(self, plan: DraftPlan) -> Answered:
        self.work()
        if not plan.in_table:
            self._stream.synchronize()
            return Answered(self._instant.answer(plan))
        self._stream.queue(partial(self._leave, plan))
        status = np.zeros(len(plan.num_proposals), np.int32)
        epoch = self._instant.description.runner_epoch
        return Answered(DraftReply(step_id=plan.step_id, runner_epoch=epoch, seq_status=status, draft_token_ids=None))

    def _leave(self, plan: DraftPlan) -> None:
        rows = torch.from_numpy(plan.table_rows.astype(np.int64))
        shape = len(rows), self.table.proposed.shape[1] - PROPOSALS
        drawn = self._instant.random.integers(1000, self._instant.description.vocab_size, shape, np.int32)
        self.table.proposed[rows, 0] = stamp_of(plan.step_id)
        self.table.proposed[rows, STATUS] = 0
        self.table.proposed[rows, PROPOSALS:] = torch.from_numpy(drawn)


class PacedTarget(PacedRunner):
    """Repeats the status of a draft's step."""

    depth = 2
    aux_buffer = None

    def __init__(self, instant: InstantTarget, wait_s: float, stream: PacedStream) -> None:
        super().__init__(instant.description.max_num_seqs, wait_s, stream)
        self._instant = instant

    def describe(self) -> RunnerDescription:
        return dataclasses.replace(self._instant.describe(), depth=self.depth)

    def launch(self, plan: TargetPlan) -> PacedPending:
        self.work()
        reply, rows = self._instant.answer(plan), torch.from_numpy(plan.table_rows.astype(np.int64))
        status: list[torch.Tensor] = []
        self._stream.queue(lambda: status.append(self.table.proposed[rows, STATUS]))
        self._stream.queue(partial(self._draw, plan, reply))
        done = self._stream.mark()

        def finish() -> TargetReply:
            told = status[0].numpy() if plan.draft_step else None
            return dataclasses.replace(reply, aux=AuxHandle(region=0), draft_status=told)

        return PacedPending(finish, done)

    def _draw(self, plan: TargetPlan, reply: TargetReply) -> None:
        rows = torch.from_numpy(plan.table_rows[plan.num_sampled_rows > 0].astype(np.int64))
        self.table.drawn[rows, 0] = torch.from_numpy(reply.num_accepted_tokens)
        width = reply.output_token_ids.shape[1]
        self.table.drawn[rows, 1 : 1 + width] = torch.from_numpy(reply.output_token_ids).int()


class _Receiver:
    """Opens what is no buffer."""

    def open(self, handle: bytes | None) -> bytes | None:
        return handle

    def resolve(self, aux: AuxHandle, num_rows: int) -> torch.Tensor:
        return torch.empty(num_rows, 0)

    def close(self) -> None:
        return None


def make_server(args: dict[str, str], role: str, wait_s: float, vocab_size: int) -> Any:
    """A server of a paced runner."""
    import triton_python_backend_utils as pb_utils

    settings = ServingSettings.from_parameters(model_parameters(args), os.environ)
    forward_logs(pb_utils, settings.log_level)
    stream, secret = PacedStream(), read_secret(os.environ)
    step_sync.order_of = lambda semaphores, *_: PacedOrder(semaphores, stream)  # type: ignore[attr-defined]
    server: Any
    if role == "target":
        target: Any = PacedTarget(InstantTarget(settings.max_num_seqs, 0, vocab_size), wait_s, stream)
        server = TargetServer(target, pb_utils, secret=secret)
        server._description = dataclasses.replace(server._description, aux_buffer=AUX_BUFFER)
        return server
    draft: Any = PacedDraft(InstantDraft(settings.max_num_seqs, 0, vocab_size), wait_s, stream)
    server = DraftServer(draft, pb_utils, secret=secret, has_semaphores=settings.shared_semaphores == "auto")
    server._receiver = _Receiver()
    return server
