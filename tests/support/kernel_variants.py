"""The variants of the Triton-language kernels that steps ask for, on a machine without a GPU: nothing compiles or runs.

A kernel is compiled anew for other constants, and for integers and pointers that divide by 16 or do not: seconds, in
the middle of serving, if warm-up has not seen the variant. Run as a program it warms two tiny runners up, runs random
steps of prompts and decode rows mixed, and prints one JSON object: variants of the warm-up, those asked for after it.
"""

import importlib
import json
import pkgutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

import kimi_kernels
from kimi_backend.checkpoint.presets import Architecture, DraftKind, Preset
from kimi_backend.cli.make_checkpoint import DRAFT_FOLDER, make_checkpoint
from kimi_backend.config.quantization_config import QuantizationMethod
from kimi_backend.config.settings import ServingSettings
from kimi_backend.runners.graphs.recorder import EagerRecorder
from kimi_backend.runners.load import loading
from kimi_backend.runners.load.placement import Placement
from kimi_backend.types.plan import DraftPlan, RowPlan, SamplingPlan, TargetPlan
from kimi_kernels import dependent_launch
from kimi_kernels.kernel_set import KernelSet

BLOCK_SIZE = 64
MAX_MODEL_LEN = 2560
MAX_NUM_SEQS = 24
NUM_STEPS = 40
K = 3


class _H100:
    """A driver that answers what the launcher asks before it compiles."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


class Variants:
    """Every variant that a launch asked for, instead of the launch."""

    def __init__(self) -> None:
        self.seen: dict[tuple[str, str, str], str] = {}
        self.new: list[str] = []

    def install(self) -> None:
        """Install it for the rest of this process."""
        driver.set_active(_H100())
        seen, new = self.seen, self.new

        def run(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
            binder = self.device_caches[0][4]
            _, specialization, chosen = binder(*args, debug=False, instrumentation_mode="", **options)
            key = (f"{self.module}.{self._fn_name}", str(specialization), str(chosen))
            if key not in seen:
                seen[key] = ""
                new.append(f"{key[0]} {dict(zip(self.arg_names, specialization, strict=False))}")

        JITFunction.run = run


def _stand_in_for_gpu() -> None:
    """CPU tensors go where CUDA tensors would; new whole numbers are zeros, as no kernel writes them."""
    for module in pkgutil.walk_packages(kimi_kernels.__path__, "kimi_kernels."):
        loaded: Any = importlib.import_module(module.name)
        if hasattr(loaded, "require"):
            loaded.require = lambda *_: None
    torch.cuda.get_device_properties = lambda *_: SimpleNamespace(multi_processor_count=132)  # type: ignore[assignment]
    dependent_launch.has_dependent_launch = lambda _: True  # type: ignore[assignment]
    # No number of a product is read by anything.
    torch.nn.functional.linear = lambda x, weight: x.new_empty(*x.shape[:-1], len(weight))  # type: ignore[assignment]
    torch.bmm = lambda x, y, **_: x.new_empty(*x.shape[:2], y.shape[2])  # type: ignore[assignment]
    empty: Callable[..., torch.Tensor] = torch.empty
    torch.empty = lambda *size, **how: _whole_numbers_zeroed(empty(*size, **how))  # type: ignore[assignment]
    new_empty: Callable[..., torch.Tensor] = torch.Tensor.new_empty
    torch.Tensor.new_empty = lambda x, *size, **how: _whole_numbers_zeroed(new_empty(x, *size, **how))  # type: ignore[method-assign, assignment]
    empty_like: Callable[..., torch.Tensor] = torch.empty_like
    torch.empty_like = lambda x, **how: _whole_numbers_zeroed(empty_like(x, **how))  # type: ignore[assignment]


def _whole_numbers_zeroed(tensor: torch.Tensor) -> torch.Tensor:
    """Ids, lengths and statuses are read on the host."""
    return tensor if tensor.is_floating_point() else tensor.zero_()


def tiny_runners(folder: Path) -> tuple[Any, Any]:
    """A target and an MLA draft with the Triton-language kernels, warmed up as if they were captured."""
    make_checkpoint(
        folder,
        preset=Preset.TINY,
        num_layers=3,
        quantization=QuantizationMethod.INT4,
        draft=DraftKind.MLA,
        architecture=Architecture.KIMI_K25,
        has_weights=False,
    )
    settings = ServingSettings(
        checkpoint=str(folder),
        draft=str(folder / DRAFT_FOLDER),
        load_format="dummy",
        max_model_len=MAX_MODEL_LEN,
        kv_tokens=MAX_NUM_SEQS * MAX_MODEL_LEN,
        max_num_seqs=MAX_NUM_SEQS,
        max_num_batched_tokens=1024,
        max_speculative_tokens=K,
        device="cpu",
    )
    dtype = torch.float16
    placement = Placement(device=torch.device("cpu"), kernels=KernelSet.triton(), dtype=dtype, kv_dtype=dtype)
    loading.place = lambda _: placement
    loading._recorder = lambda *_: EagerRecorder()  # type: ignore[assignment]
    return loading.load_pair(settings)


def run_step(rng: np.random.Generator, target: Any, draft: Any) -> None:
    """Run at most 20 decode sequences of 1 or k + 1 rows, then at most 4 prompt chunks, some of which draw a token."""
    k = int(rng.choice([0, K]))
    decode = rng.choice([1, k + 1], int(rng.integers(1, 20)))
    chunks = rng.integers(9, 180, int(rng.integers(0, 5)))
    query_lens = np.concatenate([decode, chunks]).astype(np.int32)
    before = np.concatenate([rng.integers(8, MAX_MODEL_LEN - 64, len(decode)), rng.choice([0, 64], len(chunks))])
    sampled = np.concatenate([decode, rng.integers(0, 2, len(chunks))]).astype(np.int32)
    seq_lens = (before + query_lens).astype(np.int32)
    count, columns = len(query_lens), -(-int(seq_lens.max() + K) // BLOCK_SIZE)
    rows = RowPlan(
        token_ids=np.ones(int(query_lens.sum()), np.int32),
        query_lens=query_lens,
        seq_lens=seq_lens,
        block_table=np.arange(count * columns, dtype=np.int32).reshape(count, columns),
    )
    draws = sampled > 0
    sampling = SamplingPlan.plain(int(draws.sum()))
    reply = target.launch(
        TargetPlan.given(
            step_id=0, rows=rows, num_sampled_rows=sampled, sampling=sampling, num_logprobs=None,
            wants_aux=np.full(count, k > 0),
        )
    ).wait()  # fmt: skip
    if k:
        draft.launch(
            DraftPlan.given(
                step_id=0, rows=rows, aux=reply.aux, aux_rows=np.arange(len(rows.token_ids), dtype=np.int64),
                num_proposals=np.where(draws, k, 0).astype(np.int32),
                sampling=sampling, output_index=seq_lens[draws].astype(np.int64) + 1,
            )
        ).wait()  # fmt: skip


def main() -> None:
    variants = Variants()
    variants.install()
    _stand_in_for_gpu()
    with tempfile.TemporaryDirectory() as folder:
        target, draft = tiny_runners(Path(folder))
        num_warm, rng = len(variants.seen), np.random.default_rng(0)
        variants.new.clear()
        for _ in range(NUM_STEPS):
            run_step(rng, target, draft)
        # Steps that no graph holds run eagerly.
        target._graphs.find = draft._graphs.extension_bucket = lambda plan: None
        for _ in range(NUM_STEPS):
            run_step(rng, target, draft)
    json.dump({"warm_up": num_warm, "later": variants.new}, sys.stdout)


if __name__ == "__main__":
    main()
