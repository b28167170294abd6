"""Streams of two processes that wait for each other on memory of the host."""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from kimi_backend.runners.hand_over.order import order_of
from kimi_backend.runners.hand_over.semaphores import (
    DRAFTED,
    PROMISED,
    TARGET_PID,
    VERIFIED,
    OpenedSemaphores,
    OwnSemaphores,
)
from kimi_backend.runners.hand_over.step_sync import DraftSync
from kimi_backend.runners.hand_over.token_table import TokenTable
from kimi_backend.runners.plan_checks import RunnerLimits
from kimi_backend.types.plan import AuxHandle, DraftPlan, RowPlan, SamplingPlan

SHAPE = (8, 16)
NUM_ROUNDS = 300
WORK = {"cpu": 128, "cuda": 512}
"""Rows and columns of the product by which a side is late."""

# Plays the target: shows its step as every number of its half, checks that the draft left the step before it.
TARGET = """
import json, os, sys, time, torch
from kimi_backend.runners.hand_over.semaphores import DRAFTED, PROMISED, TARGET_PID, VERIFIED, OpenedSemaphores
from kimi_backend.runners.hand_over.order import order_of

handle, num_rounds, behaviour, device = sys.argv[1].encode(), int(sys.argv[2]), sys.argv[3], torch.device(sys.argv[4])
semaphores = OpenedSemaphores.open(handle).semaphores
semaphores.set_value(TARGET_PID, os.getpid())
order = order_of(semaphores, device)
drawn, proposed = (torch.empty_like(semaphores.drawn, device=device) for _ in range(2))
num_wrong, work = torch.zeros((), dtype=torch.int64, device=device), torch.ones([int(sys.argv[5])] * 2, device=device)
print("open", flush=True)
for step in range(1, num_rounds + 1):
    semaphores.set_value(PROMISED, step)
    order.wait(DRAFTED, step - 1)
    order.copy(proposed, semaphores.proposed)
    if step > 1:
        num_wrong += (proposed != step - 1).sum()
    work @ work
    drawn.fill_(step)
    order.copy(semaphores.drawn, drawn)
    order.write(VERIFIED, step)
if behaviour == "ends":
    print(json.dumps(num_wrong.item()), flush=True)
else:
    time.sleep(600)
"""


@contextmanager
def target(handle: bytes, num_rounds: int, behaviour: str, device: str) -> Iterator["subprocess.Popen[str]"]:
    arguments = [handle.decode(), str(num_rounds), behaviour, device, str(WORK[device])]
    process = subprocess.Popen([sys.executable, "-c", TARGET, *arguments], stdout=-1, text=True)
    assert process.stdout is not None
    try:
        assert process.stdout.readline().strip() == "open"
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("name", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_each_reads_what_the_other_has_shown_round_after_round(name: str) -> None:
    device = torch.device(name)
    own = OwnSemaphores(SHAPE)
    semaphores, order = own.semaphores, order_of(own.semaphores, device)
    drawn, proposed = (torch.empty_like(semaphores.drawn, device=device) for _ in range(2))
    num_wrong, work = torch.zeros((), dtype=torch.int64, device=device), torch.ones([WORK[name]] * 2, device=device)
    with target(own.handle, NUM_ROUNDS, "ends", name) as process:
        for step in range(1, NUM_ROUNDS + 1):
            order.wait(VERIFIED, step)
            order.copy(drawn, semaphores.drawn)
            num_wrong += (drawn != step).sum()
            work @ work
            proposed.fill_(step)
            order.copy(semaphores.proposed, proposed)
            order.write(DRAFTED, step)
        assert process.stdout is not None
        assert json.loads(process.stdout.readline()) == 0
    assert num_wrong.item() == 0
    assert semaphores.value(DRAFTED) == NUM_ROUNDS
    order.close()


class Watcher:
    """Stands for a draft; keeps what the table said when its step was run."""

    depth = 1

    def __init__(self, drawn: torch.Tensor) -> None:
        self._drawn = drawn
        self.seen: list[torch.Tensor] = []

    def describe(self) -> Any:
        raise NotImplementedError

    def launch(self, plan: DraftPlan) -> Any:
        self.seen.append(self._drawn.clone())


def behind(step_id: int) -> DraftPlan:
    """A draft step of one sequence behind a verify."""
    ones = np.ones(1, np.int32)
    plan = DraftPlan.given(
        step_id=step_id,
        rows=RowPlan(token_ids=ones, query_lens=ones, seq_lens=ones, block_table=np.zeros((1, 1), np.int32)),
        aux=AuxHandle(region=0),
        aux_rows=np.zeros(1, np.int64),
        num_proposals=ones,
        sampling=SamplingPlan.plain(1),
        output_index=np.full(1, 2),
        in_table=True,
    )
    return replace(plan, num_drawn=ones)


@pytest.mark.gpu
def test_a_stream_is_let_go_when_the_other_process_dies(caplog: pytest.LogCaptureFixture) -> None:
    device = torch.device("cuda")
    limits = RunnerLimits(max_num_batched_tokens=8, max_num_seqs=4, max_model_len=8)
    table = TokenTable.allocate(limits, device, is_split=True)
    side, draft, is_done = DraftSync(table, device), Watcher(table.drawn), torch.cuda.Event()
    with target(side.handle, 1, "stays", "cuda") as process:
        side.launch(behind(1), draft)
        torch.cuda.synchronize()
        assert (draft.seen[0] == 1).all()
        side._semaphores.set_value(PROMISED, 2)
        side.launch(behind(2), draft)
        is_done.record()
        assert side._semaphores.value(VERIFIED) == 1, "the host waited for its stream, until that was let go"
        assert not is_done.query()
        process.kill()
        torch.cuda.synchronize()
    assert "a step waits no longer for the other runner: dead" in caplog.messages
    assert not draft.seen[1].any()
    assert torch.ones(4, device="cuda").sum().item() == 4
    side.close()


def test_shared_semaphores_are_seen_by_who_opens_them() -> None:
    own = OwnSemaphores(SHAPE)
    opened = OpenedSemaphores.open(own.handle)
    opened.semaphores.set_value(TARGET_PID, 5)
    opened.semaphores.drawn[3, 2] = 7
    opened.semaphores.proposed[7, 15] = 9
    assert own.semaphores.value(TARGET_PID) == 5
    assert own.semaphores.drawn.sum() == 7
    assert own.semaphores.proposed[7, 15] == 9
    assert own.semaphores.num_bytes % 4096 == 0
    assert own.semaphores.address % 4096 == 0
