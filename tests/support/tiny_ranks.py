"""Tiny models on ranks in processes of their own, on a CPU, and a rank 0 to be ended."""

import os
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from kimi_backend.checkpoint.presets import Architecture, DraftKind, Preset
from kimi_backend.cli.make_checkpoint import make_checkpoint
from kimi_backend.config.quantization_config import QuantizationMethod
from kimi_backend.config.settings import ServingSettings
from kimi_backend.types.plan import AuxHandle, DraftPlan, RowPlan, SamplingPlan, TargetPlan


def make_tiny(folder: Path, draft: DraftKind) -> Path:
    """A checkpoint of random weights, and a draft inside."""
    make_checkpoint(
        folder,
        preset=Preset.TINY,
        num_layers=3,
        quantization=QuantizationMethod.INT4,
        draft=draft,
        architecture=Architecture.KIMI_K25,
        has_weights=True,
    )
    return folder


def tiny_settings(folder: Path, **changes: Any) -> ServingSettings:
    """The plain kernels, whose results follow the number of ranks only by rounding."""
    values: dict[str, Any] = {
        "checkpoint": str(folder),
        "draft": str(folder / "draft"),
        "max_model_len": 256,
        "kv_tokens": 2048,
        "max_num_seqs": 8,
        "device": "cpu",
        "kernels": "plain",
    }
    return ServingSettings(**(values | changes))


def one_row_plan(step_id: int) -> TargetPlan:
    """A step of one sequence's first token."""
    return TargetPlan.given(
        step_id=step_id,
        rows=RowPlan(
            token_ids=np.array([1], np.int32),
            query_lens=np.array([1], np.int32),
            seq_lens=np.array([1], np.int32),
            block_table=np.zeros((1, 4), np.int32),
        ),
        num_sampled_rows=np.array([1], np.int32),
        sampling=SamplingPlan.plain(1),
        num_logprobs=None,
        wants_aux=np.array([False]),
    )


def draft_plan(step_id: int) -> DraftPlan:
    """A draft's step of one sequence's first token."""
    target = one_row_plan(step_id)
    return DraftPlan.given(
        step_id=step_id,
        rows=target.rows,
        aux=AuxHandle(),
        aux_rows=np.zeros(1, np.int64),
        num_proposals=np.zeros(1, np.int32),
        sampling=SamplingPlan.plain(0),
        output_index=np.empty(0, np.int64),
    )


def run_rank_0(folder: str, action: str, tell: Connection, errors: str) -> None:
    """Load, tell the process id of the other rank, then: wait | run (steps for ever) | mislead (rank 1 alone gets a
    step that it cannot run). What this process says is in the file `errors`."""
    os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT), sys.stderr.fileno())
    from kimi_backend.runners.load.loading import load_target_runner

    target = load_target_runner(tiny_settings(Path(folder), draft="", tensor_parallel_size=2))
    workers: Any = target.workers
    tell.send(workers.process_ids[0])
    step_id = 0
    while action == "run":
        step_id += 1
        target.launch(one_row_plan(step_id)).wait()
    if action == "mislead":
        with target.workers.run(draft_plan(1)):
            pass
    time.sleep(60)
    os._exit(0)
