"""Runners that compute nothing behind the real server: they sleep as long as they are told and answer at random.

What is left of a round is the server's: `server_overhead.py --paced TARGET_MS DRAFT_MS` needs no GPU, and two cores are
enough. Sleeping lets go of the interpreter and of the core, as a process that waits for its GPU does.
"""

import dataclasses
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from engine_overhead import InstantDraft, InstantTarget
from kimi_backend.config.settings import ServingSettings
from kimi_backend.serving.boundary import forward_logs
from kimi_backend.serving.descriptions import model_parameters
from kimi_backend.serving.runner_server import RunnerServer
from kimi_backend.types.plan import (
    AuxHandle,
    DraftPlan,
    DraftReply,
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


class PacedDraft(InstantDraft):
    """Where it may leave its tokens, it answers at once and is `wait_s` behind, as a draft on a GPU."""

    left_shape = (LONGEST_PROPOSAL + 1, MOST_SEQUENCES)
    _left = np.zeros(left_shape, np.int32)

    def propose(self, plan: DraftPlan) -> DraftReply:
        if not plan.leaves_tokens:
            return super().propose(plan)
        num_seqs = len(plan.num_proposals)
        left = self._left
        left[1:, :num_seqs] = self.random.integers(1000, self.description.vocab_size, (LONGEST_PROPOSAL, num_seqs))
        return DraftReply(
            step_id=plan.step_id,
            runner_epoch=self.description.runner_epoch,
            seq_status=np.zeros(num_seqs, np.int32),
            draft_token_ids=np.empty((0, 0), np.int64),
            tokens=TokenHandle(num_seqs=num_seqs, tensor=torch.from_numpy(left)),
        )


@dataclasses.dataclass(frozen=True, slots=True)
class PacedPending:
    """A step of a device that takes one after another."""

    reply: TargetReply
    done_s: float

    def wait(self) -> TargetReply:
        time.sleep(max(self.done_s - time.perf_counter(), 0.0))
        return self.reply


class PacedTarget(InstantTarget):
    """Repeats the status of a draft's step."""

    _free_s = 0.0
    _last_step_id = -1
    """Of the step that was launched last."""

    def describe(self) -> RunnerDescription:
        return dataclasses.replace(super().describe(), queues_steps=True)

    def launch(self, plan: TargetPlan) -> PacedPending | None:
        if plan.drawn_rows is not None and self._last_step_id != plan.step_id - 1:
            return None
        self._free_s = max(self._free_s, time.perf_counter()) + self.wait_s
        self._last_step_id = plan.step_id
        return PacedPending(self.answer(plan), self._free_s)

    def verify(self, plan: TargetPlan) -> TargetReply:
        tokens = plan.draft_tokens
        status = None if tokens.tensor is None else tokens.tensor[0].numpy()
        return dataclasses.replace(super().verify(plan), draft_status=status)


class _NoReceiver:
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
    kind = PacedTarget if role == "target" else PacedDraft
    shows_tokens = settings.token_board == "on"
    server: Any = RunnerServer(kind(settings.max_num_seqs, wait_s, vocab_size), pb_utils, shows_tokens=shows_tokens)
    if role == "target":
        server._description = dataclasses.replace(server._description, aux_buffer=AUX_BUFFER)
    else:
        server._receiver = _NoReceiver()
        if server._board is not None:
            server._board._wait = lambda event: time.sleep(wait_s)
    return server
