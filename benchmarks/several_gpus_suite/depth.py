"""The deepest slice of Kimi-K2.5 that N GPUs hold: rounds, time a layer, and what a half of it would have foretold."""

import bisect
import json
from pathlib import Path
from typing import Any

from kimi_backend.checkpoint.presets import Preset
from kimi_backend.config.settings import ServingSettings
from kimi_backend.errors import ConfigError
from kimi_backend.runners.load.opened_checkpoints import check_servable
from several_gpus_suite.verdict import Verdict, run_command
from slice_suite.configs import write_slice

BATCHES, KS = (1, 4, 16, 64), (0, 3)
LONG_PROMPT, LONG_BATCHES = 32_768, (1, 4, 16)
LONG_TOKENS = 320
"""Output tokens of such a prompt: the first one must still run when the last one's four chunks have passed."""
FEWEST_LAYERS, MOST_LAYERS = 3, 61
ALLOWED_ERROR = 0.03


def run(num_ranks: int, *, is_cpu: bool, out: Path) -> Verdict:
    """Measure it at its depth, at a half and at a quarter: the two shallower ones foretell the deepest."""
    preset, verdict = (Preset.TINY if is_cpu else Preset.KIMI_K25), Verdict()
    deepest = 5 if is_cpu else deepest_that_fits(preset, num_ranks, out / "checkpoints")
    depths = [3, 4, 5] if is_cpu else sorted({max(FEWEST_LAYERS, deepest // 4), deepest // 2, deepest})
    verdict.tell(f"layers that fit {num_ranks} ranks: {deepest}; measured at {', '.join(map(str, depths))}")
    command = ["benchmarks/slice.py", "--preset", preset.value, "--layers", ",".join(map(str, depths))]
    command += ["--ks", ",".join(map(str, KS)), "--set", f"tensor_parallel_size={num_ranks}"]
    if is_cpu:
        command += ["--set", "device=cpu", "--set", "kernels=plain"]
    short = ["--prompts", "64" if is_cpu else "1024", "--batches", "1,4" if is_cpu else ",".join(map(str, BATCHES))]
    folder = out / f"depth-{num_ranks}"
    status = run_command([*command, *short, "--tokens", "48", "--out", str(folder)])
    verdict.ask(status == 0, f"the slice ran to its end (status {status})")
    if status == 0:
        judge(json.loads((folder / "slice.json").read_text())["cases"], depths, verdict, asks=not is_cpu)
    if not is_cpu:
        long = ["--prompts", str(LONG_PROMPT), "--batches", ",".join(map(str, LONG_BATCHES))]
        command[command.index("--layers") + 1] = str(depths[0])
        status = run_command([*command, *long, "--tokens", str(LONG_TOKENS), "--out", str(folder / "long")])
        verdict.ask(status == 0, f"prompts of {LONG_PROMPT} at {depths[0]} layers ran to their end (status {status})")
    return verdict


def deepest_that_fits(preset: Preset, num_ranks: int, folder: Path, *, gpu_memory_gib: float = 0.0) -> int:
    """The most layers whose weights, with KV for the largest batch of short prompts, the memory plan places.

    gpu_memory_gib: of one GPU; 0 takes what the GPUs of this host have.
    """
    folder.mkdir(parents=True, exist_ok=True)

    def is_too_deep(num_layers: int) -> bool:
        target, draft = write_slice(folder, num_layers, preset, num_ranks=num_ranks)
        settings = ServingSettings(
            checkpoint=str(target),
            draft=str(draft),
            load_format="dummy",
            tensor_parallel_size=num_ranks,
            max_model_len=2048,
            kv_tokens=max(BATCHES) * 2048,
            max_num_seqs=max(BATCHES),
            max_num_batched_tokens=8192,
            max_speculative_tokens=max(KS),
            gpu_memory_gib=gpu_memory_gib,
        )
        try:
            check_servable(settings)
        except ConfigError:
            return True
        return False

    depths = range(FEWEST_LAYERS, MOST_LAYERS + 1)
    deepest = FEWEST_LAYERS - 1 + bisect.bisect_left(depths, True, key=is_too_deep)
    if deepest < FEWEST_LAYERS:
        raise ConfigError(f"tensor_parallel_size: {num_ranks} GPUs hold no slice of {FEWEST_LAYERS} layers or more")
    return deepest


def judge(cases: list[dict[str, Any]], depths: list[int], verdict: Verdict, *, asks: bool) -> None:
    """A line through the two shallower depths foretells the round of the deepest."""
    rounds = {
        (case["num_speculative_tokens"], case["batch_size"], case["num_layers"]): case["round_ms"]
        for case in cases
        if "round_ms" in case
    }
    for k, batch_size in sorted({key[:2] for key in rounds}):
        times = [rounds.get((k, batch_size, depth)) for depth in depths]
        if len(depths) < 3 or None in times:
            verdict.ask(False, f"k {k}, {batch_size:2} sequences: not measured at three depths: {times}")
            continue
        first, second, measured = (time for time in times if time is not None)
        layer_ms = (second - first) / (depths[1] - depths[0])
        foretold = second + layer_ms * (depths[2] - depths[1])
        text = (
            f"k {k}, {batch_size:2} sequences: {measured:7.2f} ms a round, {1e3 * layer_ms:6.0f} us a layer;"
            f" foretold {foretold:7.2f} ms"
        )
        if asks:
            verdict.ask(abs(foretold / measured - 1) <= ALLOWED_ERROR, text)
        else:
            verdict.tell(text)
