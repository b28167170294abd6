"""Captured prompt steps as CUDA graphs against plain calls of the same functions, and against eager steps."""

from typing import Any

import numpy as np
import pytest
import torch

from kimi_backend.runners.graphs.recorder import EagerRecorder, GraphRecorder, Recorder
from kimi_backend.runners.plan_checks import RunnerLimits
from kimi_kernels.kernel_set import KernelSet
from support.captured_runners import Setting, runner_pair
from support.captured_steps import assert_equal_steps, step_in_order
from support.speculative_loop import SpeculativeLoop
from support.tiny_configs import HOPPER_WIDTHS

pytestmark = pytest.mark.gpu

LIMITS = RunnerLimits(
    max_num_batched_tokens=512,
    max_num_seqs=6,
    max_model_len=512,
    max_speculative_tokens=3,
    capture_batch_sizes=(6,),
)
LENGTHS = [3, 333, 170, 9, 64, 257]
KS = [3, 0, 2, 1, 3, 2]
ORDERS = ([0], [0, 1], [2, 0, 1], [3, 0, 4, 2, 1], [0, 5, 3], [5, 4, 3, 2, 1, 0], [1, 5], [0, 1, 2, 3, 4, 5])
"""Prompts begin at different times, and leave and come back in another order."""
CHUNK = 101


def loop(kind: str, recorder: Recorder | None, **fields: Any) -> SpeculativeLoop:
    setting = Setting(
        kernels=KernelSet.triton(),
        device=torch.device("cuda"),
        dtype=torch.bfloat16,
        limits=LIMITS,
        num_blocks=64,
        block_size=64,
        **fields,
    )
    generator = np.random.default_rng(1)
    prompts = [generator.integers(0, 96, length).tolist() for length in LENGTHS]
    return SpeculativeLoop(*runner_pair(setting, kind, recorder, **HOPPER_WIDTHS), prompts, KS, temperature=1.0, seed=3)


@pytest.mark.parametrize("kind", ["mla31", "mha"])
@pytest.mark.parametrize("kv", [{}, {"kv_dtype": torch.float8_e4m3fn, "kv_scale": 0.5}], ids=["bf16", "float8"])
def test_replays_equal_the_recorded_function(kind: str, kv: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit, from pools full of NaN: chunks that go on beside ones that end and sequences that decode. What a
    graph would read of an earlier step, or of a slot that nobody wrote, shows."""
    loops = [loop(kind, recorder, **kv) for recorder in (GraphRecorder(torch.device("cuda")), EagerRecorder())]
    for one in loops:
        for runner in (one._target, one._draft):
            monkeypatch.setattr(runner, "_launch_eagerly", None)
    for order in ORDERS:
        steps = [step_in_order(one, order, CHUNK) for one in loops]
        assert_equal_steps(*steps)
        assert not steps[0].target_reply.seq_status.any()


def test_hidden_states_are_near_those_of_eager_steps() -> None:
    """Eager steps take the expanded form of attention over whole chunks, where captured ones take the absorbed form
    over parts. Prompts only: behind the first draw texts may part at a tie."""
    captured, eager = (loop("mla31", recorder) for recorder in (GraphRecorder(torch.device("cuda")), None))
    for order in ([1], [1, 2, 5], [5, 1, 2]):
        found, expected = (
            step_in_order(one, order, CHUNK).target_reply.aux.tensor.float()  # type: ignore[union-attr]
            for one in (captured, eager)
        )
        error = (found - expected).norm(dim=1) / expected.norm(dim=1)
        # A row that takes another expert at a near tie is far off.
        assert float(error.median()) < 0.02
        assert float((error > 0.1).float().mean()) < 0.1
