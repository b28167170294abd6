"""Tensor parallelism on the GPUs of one host, a process each: collectives, and models at Kimi-K2.5's widths."""

import functools
import socket

import pytest
import torch
import torch.multiprocessing as mp

from kimi_backend.checkpoint.presets import DraftKind
from kimi_backend.config.linear_format import LinearFormat
from support.gpu_ranks import (
    Check,
    check_draft,
    check_eager_collectives,
    check_norms_in_a_graph,
    check_sums_in_a_graph,
    check_target,
    run_rank,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="two GPUs needed, one a rank"),
]
NUM_RANKS = 2


def run(check: Check) -> None:
    """Run a check on every rank; fails where one rank's does."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    mp.spawn(run_rank, args=(NUM_RANKS, address, check), nprocs=NUM_RANKS)


def test_collectives() -> None:
    run(check_eager_collectives)


def test_sums_in_a_graph() -> None:
    run(check_sums_in_a_graph)


def test_sums_with_their_norm_in_a_graph() -> None:
    run(check_norms_in_a_graph)


def test_a_slice_of_the_target() -> None:
    run(check_target)


@pytest.mark.parametrize(
    ("kind", "linear_format"),
    [
        (DraftKind.MLA, LinearFormat.NONE),
        (DraftKind.MLA, LinearFormat.INT4),
        (DraftKind.MLA31, LinearFormat.FP8),
        (DraftKind.MHA, LinearFormat.NONE),
    ],
)
def test_drafts(kind: DraftKind, linear_format: LinearFormat) -> None:
    run(functools.partial(check_draft, kind=kind, linear_format=linear_format))
