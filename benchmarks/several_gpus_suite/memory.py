"""The memory plan against what a GPU has lent once the models are loaded and have run, for the presets that fit."""

import gc
from pathlib import Path

import torch

from kimi_backend.checkpoint.presets import Preset
from kimi_backend.config.memory_plan import GIB, MemoryPlan
from kimi_backend.config.settings import ServingSettings
from kimi_backend.runners.load.loading import load_pair
from kimi_backend.runners.load.opened_checkpoints import Checkpoints, memory_plan
from kimi_backend.runners.load.placement import place
from several_gpus_suite.depth import deepest_that_fits
from several_gpus_suite.verdict import Verdict
from slice_suite.configs import write_slice
from slice_suite.in_process import run_batch

BATCH_SIZE, PROMPT_LEN = 64, 1024


def run(num_ranks: int, *, is_cpu: bool, out: Path) -> Verdict:
    """Load each, run a batch, and ask that no GPU has lent more than its plan says."""
    verdict = Verdict()
    for preset in (Preset.TINY,) if is_cpu else (Preset.TINY, Preset.KIMI_K25):
        layers = 4 if preset is Preset.TINY else deepest_that_fits(preset, num_ranks, out / "checkpoints")
        target, draft = write_slice(out / "checkpoints", layers, preset, num_ranks=num_ranks)
        settings = ServingSettings(
            checkpoint=str(target),
            draft=str(draft),
            load_format="dummy",
            tensor_parallel_size=num_ranks,
            speculation_policy="fixed",
            max_model_len=128 if is_cpu else 2048,
            max_num_seqs=BATCH_SIZE,
            max_num_batched_tokens=8192,
            device="cpu" if is_cpu else "auto",
        )
        _measure(settings, f"{preset.value}, {layers} layers", verdict, prompt_len=64 if is_cpu else PROMPT_LEN)
    return verdict


def _measure(settings: ServingSettings, name: str, verdict: Verdict, *, prompt_len: int) -> None:
    placement = place(settings)
    plan = memory_plan(settings, Checkpoints.open(settings, placement), placement)
    before = _free_bytes(settings.tensor_parallel_size)
    models = load_pair(settings)
    assert models[1] is not None
    run_batch(
        *models,
        settings,
        vocab_size=models[0].describe().vocab_size,
        batch_size=min(BATCH_SIZE, plan.num_kv_tokens // (prompt_len + 64)),
        prompt_len=prompt_len,
        num_speculative_tokens=3,
        num_output_tokens=32,
    )
    lent = [a - b for a, b in zip(before, _free_bytes(settings.tensor_parallel_size), strict=True)]
    models[0].close()
    models[1].close()
    del models  # the last names of the pools, which the next preset needs the room of
    gc.collect()
    if lent:
        torch.cuda.empty_cache()
    _judge(name, plan, lent, verdict)


def _free_bytes(num_gpus: int) -> list[int]:
    """Read the free memory of each GPU; none on a CPU."""
    return [torch.cuda.mem_get_info(gpu)[0] for gpu in range(num_gpus)] if torch.cuda.is_available() else []


def _judge(name: str, plan: MemoryPlan, lent: list[int], verdict: Verdict) -> None:
    planned = plan.total_bytes / GIB
    if not lent:
        verdict.ask(True, f"{name}: loaded and ran; the plan of {planned:.2f} GiB a rank is not judged on a CPU")
    for gpu, num_bytes in enumerate(lent):
        found = num_bytes / GIB
        verdict.ask(found <= planned, f"{name}, GPU {gpu}: {found:.2f} GiB lent of {planned:.2f} GiB planned")
