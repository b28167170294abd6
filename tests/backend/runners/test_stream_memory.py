"""Streams of two processes that wait for each other on memory of the host."""

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from kimi_backend.serving.board_order import order_of
from kimi_backend.serving.board_sides import DraftSide
from kimi_backend.serving.step_board import LEFT, TARGET_PID, VERIFIED, OpenedBoard, OwnBoard
from kimi_backend.types.plan import DrawnHandle

SHAPE = (8, 16)
NUM_ROUNDS = 300

# Plays the target: shows `stamp` as every token, checks that the draft left the stamp before it.
TARGET = """
import json, os, sys, time, torch
from kimi_backend.serving.board_order import order_of
from kimi_backend.serving.step_board import LEFT, TARGET_PID, VERIFIED, OpenedBoard

board = OpenedBoard.open(sys.argv[1].encode()).board
board.set_word(TARGET_PID, os.getpid())
device = torch.device("cuda")
order, drawn, left = order_of(board, device), board.drawn.like(device), torch.empty_like(board.left, device=device)
num_wrong, work = torch.zeros((), dtype=torch.int64, device=device), torch.ones((512, 512), device=device)
print("open", flush=True)
for stamp in range(1, int(sys.argv[2]) + 1):
    order.wait(LEFT, stamp - 1)
    order.copy(left, board.left)
    if stamp > 1:
        num_wrong += (left != stamp - 1).sum()
    work @ work
    drawn.token_ids.fill_(stamp)
    drawn.num_accepted.fill_(-stamp)
    order.copy(board.drawn.whole, drawn.whole)
    order.write(VERIFIED, stamp)
if sys.argv[3] == "ends":
    torch.cuda.synchronize()
    print(json.dumps(num_wrong.item()), flush=True)
else:
    time.sleep(60)
"""


@contextmanager
def target(handle: bytes, num_rounds: int, behaviour: str) -> Iterator["subprocess.Popen[str]"]:
    process = subprocess.Popen(
        [sys.executable, "-c", TARGET, handle.decode(), str(num_rounds), behaviour], stdout=-1, text=True
    )
    assert process.stdout is not None
    try:
        assert process.stdout.readline().strip() == "open"
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.gpu
def test_each_reads_what_the_other_has_shown_round_after_round() -> None:
    device = torch.device("cuda")
    own = OwnBoard(SHAPE)
    board, order = own.board, order_of(own.board, device)
    drawn, left = board.drawn.like(device), torch.empty_like(board.left, device=device)
    num_wrong, work = torch.zeros((), dtype=torch.int64, device=device), torch.ones((512, 512), device=device)
    with target(own.handle, NUM_ROUNDS, "ends") as process:
        for stamp in range(1, NUM_ROUNDS + 1):
            order.wait(VERIFIED, stamp)
            order.copy(drawn.whole, board.drawn.whole)
            num_wrong += (drawn.token_ids != stamp).sum() + (drawn.num_accepted != -stamp).sum()
            work @ work
            left.fill_(stamp)
            order.copy(board.left, left)
            order.write(LEFT, stamp)
        torch.cuda.synchronize()
        assert process.stdout is not None
        assert json.loads(process.stdout.readline()) == 0
    assert num_wrong.item() == 0
    assert board.word(LEFT) == NUM_ROUNDS
    order.close()


@pytest.mark.gpu
def test_a_stream_is_let_go_when_the_other_process_dies() -> None:
    side, seen = DraftSide(SHAPE, torch.device("cuda")), []

    def step(drawn: DrawnHandle) -> None:
        seen.append(drawn.num_accepted_tokens.clone())  # type: ignore[union-attr]

    with target(side.handle, 1, "stays") as process:
        assert side.follow(1, step) is None
        torch.cuda.synchronize()
        assert seen[0].tolist() == [-1] * SHAPE[1]
        start = time.monotonic()
        threading.Timer(0.2, process.kill).start()
        assert side.follow(2, step) is None
        assert time.monotonic() - start < 0.15, "the host waited for its stream"
        torch.cuda.synchronize()
        assert 0.1 < time.monotonic() - start < 3
    assert seen[1].tolist() == [0] * SHAPE[1]
    assert torch.ones(4, device="cuda").sum().item() == 4
    side.close()


def test_a_board_is_seen_by_who_opens_it() -> None:
    own = OwnBoard(SHAPE)
    opened = OpenedBoard.open(own.handle)
    opened.board.set_word(TARGET_PID, 5)
    opened.board.drawn.token_ids[3, 2] = 7
    opened.board.left[7, 15] = 9
    assert own.board.word(TARGET_PID) == 5
    assert own.board.drawn.token_ids.sum() == 7
    assert own.board.left[7, 15] == 9
    assert own.board.num_bytes % 4096 == 0
    assert own.board.address % 4096 == 0
