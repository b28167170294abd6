"""The process of one rank other than 0.

    python -m kimi_backend.rank_worker.worker PIPE_DESCRIPTOR

`workers` starts it and tells it through the pipe what to load, then what to run. It ends with the process that started
it, however that ends, and when a step fails: the others are in a collective then, waiting for it.
"""

import contextlib
import gc
import logging
import os
import sys
import traceback
from multiprocessing.connection import Connection

import torch

from kimi_backend.config.settings import ServingSettings
from kimi_backend.errors import KimiError
from kimi_backend.parallel import TensorParallelGroup
from kimi_backend.processes import end_with_starter, keep_large_memory
from kimi_backend.rank_worker.tensor_parallel_worker import TensorParallelWorker
from kimi_backend.runners.load.loading import Role, load_rank
from kimi_backend.runners.load.opened_checkpoints import Checkpoints
from kimi_backend.runners.load.placement import place
from kimi_backend.runners.ranks.device_watch import watch_device
from kimi_backend.runners.ranks.messages import (
    ANSWER,
    CLOSE,
    FAILED,
    READY,
    TIMEOUTS,
    Assignment,
    Pipe,
    Question,
    unpacked,
)
from kimi_backend.runners.ranks.process_group import join_ranks, leave

logger = logging.getLogger("kimi_backend.runners")


def _load(assignment: Assignment) -> tuple[TensorParallelWorker, TensorParallelGroup]:
    role = Role(assignment.role)
    settings = ServingSettings(**assignment.settings)
    placement = place(settings, assignment.rank)
    group = join_ranks(assignment.rank, assignment.size, assignment.address, placement.device, **TIMEOUTS)
    checkpoints = Checkpoints.open(settings, placement)
    target, draft = load_rank(settings, role, placement, checkpoints, group)
    return TensorParallelWorker(target, draft), group


def serve(pipe: Pipe, worker: TensorParallelWorker) -> None:
    """Run what comes until the pipe says that it is over. Ends the process with the pipe."""
    while True:
        try:
            message = pipe.recv()
        except (EOFError, ConnectionError):
            os._exit(1)  # the parent is gone
        if message == CLOSE:
            return
        told = unpacked(message)
        if not isinstance(told, Question):
            worker.run(told)
            continue
        try:
            pipe.send((ANSWER, worker.answer(told.name, told.content)))
        except KimiError as error:
            pipe.send((FAILED, str(error)))


def main(arguments: list[str]) -> None:
    """Does not return."""
    pipe = Connection(int(arguments[0]))
    assignment = Assignment(**pipe.recv())
    end_with_starter(assignment.parent_pid)
    keep_large_memory()
    logging.basicConfig(
        level=logging.ERROR, format=f"%(levelname)s rank {assignment.rank} of the {assignment.role}: %(message)s"
    )

    def fail(error: BaseException) -> None:
        _report(pipe, assignment, error)
        os._exit(1)

    try:
        worker, group = _load(assignment)
        gc.collect()
        gc.freeze()  # a look at all that is loaded would hold every rank's step up
        watch_device(worker.device, fail)
        pipe.send((READY, b""))
        serve(pipe, worker)
    except BaseException as error:
        fail(error)
    _leave(worker, group)
    os._exit(0)


def _report(pipe: Pipe, assignment: Assignment, error: BaseException) -> None:
    text = str(error) if isinstance(error, KimiError) else "".join(traceback.format_exception(error))
    sys.stderr.write(f"rank {assignment.rank} of the {assignment.role} has failed: {text}\n")
    sys.stderr.flush()
    with contextlib.suppress(OSError):
        pipe.send((FAILED, str(error) if isinstance(error, KimiError) else repr(error)))


def _leave(worker: TensorParallelWorker, group: TensorParallelGroup) -> None:
    worker.drop_captures()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    gc.unfreeze()
    gc.collect()  # captured steps are in cycles
    leave(group)


if __name__ == "__main__":
    main(sys.argv[1:])
