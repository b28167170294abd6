"""Whole rounds of slices of Kimi-K2.5 at full width: one dense layer, N - 1 expert layers, the EAGLE3 MLA draft.

    PYTHONPATH=kernels:backend python benchmarks/slice.py --out results
    PYTHONPATH=kernels:backend python benchmarks/slice.py --layers 5 --batches 1,16 --prompts 1024 --profile 1,16
    PYTHONPATH=kernels:backend python benchmarks/slice.py --rank-of 8 --layers 5,21 --prompts 1024
    PYTHONPATH=kernels:backend python benchmarks/slice.py --layers 5 --prompt-steps 256:16:1024 2048:0:0

Weights are random and made on the GPU, routing is uniform, draft tokens are accepted at random with a mean length:
the time of a round is real, its text means nothing. Each case runs through the engine in this process, then its steady
rounds run again without the engine. The floor comes from the read bandwidth of the same run.

With --rank-of N the GPU runs what one of N does: its slices of all weights, and the sums and gathers over ranks without
the other ranks, in which nothing crosses NVLink (`slice_suite.one_of_ranks`); --pause-us says how much longer each
takes. With `--set tensor_parallel_size=2` two GPUs have the shapes of N, and their sums are real.
"""

import argparse
import dataclasses
import gc
import itertools
import json
import logging
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from kernel_cases import Ceilings
from kimi_backend.checkpoint.presets import vocab_size
from kimi_backend.config.quantization_config import QuantizationMethod
from kimi_backend.config.settings import ServingSettings
from slice_suite import judged, report, tables
from slice_suite.configs import write_slice
from slice_suite.measure import measure_case
from slice_suite.options import cases, parse_options
from slice_suite.prompt_steps import measure_prompt_step

MARGIN_TOKENS = 16
PREFILL_ROWS = 8192


def main() -> None:
    options = parse_options(__doc__)
    if options.tables:
        print_tables(options.tables, options.out)
        return
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    ceilings = probe()
    document: dict[str, Any] = {
        "command": " ".join(sys.argv),
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "ceilings": None if ceilings is None else dataclasses.asdict(ceilings),
        "cases": [],
    }
    with tempfile.TemporaryDirectory() as folder:
        for num_layers in options.layers:
            measure = measure_served_depth if options.served else measure_depth
            measure(options, Path(folder), num_layers, ceilings, document)
    after = probe()
    document["ceilings_after"] = None if after is None else dataclasses.asdict(after)
    document["per_layer"] = report.per_layer(document["cases"])
    for entry in document["per_layer"]:
        print(json.dumps(entry))
    for line in report.beside_verdicts(document["cases"]):
        print(line)
    save(options, document)
    draw(options, document)


def print_tables(paths: list[Path], out: Path | None) -> None:
    """Markdown of several runs together, and their picture in `out`."""
    found = tables.load_cases(paths)
    for text in (
        judged.judged_table(found),
        tables.rounds_table(found),
        tables.layers_table(found),
        tables.gpu_table(found),
    ):
        print(text + "\n")
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        report.plot(found, out / "slice.png", f"Kimi-K2.5 slice, {found[0]['device']}; weights and routing made up")


def probe() -> Ceilings | None:
    """The card's read bandwidth and product rate; None without a card."""
    if not torch.cuda.is_available():
        return None
    from kernel_cases.ceilings import discard_reason, measure_ceilings

    ceilings = measure_ceilings()
    card = torch.cuda.get_device_name()
    print(
        f"{card}: read {ceilings.read_bytes_per_us / 1e3:.0f} GB/s,"
        f" bf16 matmul {ceilings.matmul_flops_per_us / 1e6:.0f} TFLOP/s {discard_reason(card, ceilings)}",
        flush=True,
    )
    torch.cuda.empty_cache()
    return ceilings


def measure_depth(
    options: argparse.Namespace, folder: Path, num_layers: int, ceilings: Ceilings | None, document: dict[str, Any]
) -> None:
    """Load one slice, measure all its cases, and give its memory back."""
    settings = slice_settings(options, folder, num_layers)
    is_alone = options.rank_of > 1 and settings.tensor_parallel_size == 1
    started = time.perf_counter()
    models = load_models(settings, options.rank_of if is_alone else 1, options.pause_us)
    print(f"{num_layers} layers loaded in {time.perf_counter() - started:.1f} s; {', '.join(settings.synthetic_parts)}")
    document["pretences"] = list(settings.synthetic_parts)
    document["settings"] = settings_that_differ(settings)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    about = {"preset": name_of(options), "num_layers": num_layers}
    for step, k in itertools.product(options.prompt_steps, options.ks):
        draft = models[1] if k else None
        measured = measure_prompt_step(models[0], draft, step, k, options.rank_of if is_alone else 1)
        document["cases"].append(about | measured)
        print(json.dumps(about | measured), flush=True)
        save(options, document)
    for case in cases(options) if not options.prompt_steps else ():
        try:
            result = about | measure_case(
                models,
                settings,
                ceilings,
                num_output_tokens=options.tokens,
                is_profiled=case["batch_size"] in options.profile,
                num_ranks=options.rank_of if is_alone else 1,
                **case,
            )
        except (RuntimeError, ValueError) as problem:  # out of memory in one case must not hide the others
            result = about | case | {"error": f"{type(problem).__name__}: {problem}"}
        document["cases"].append(result)
        print(report.row(result), flush=True)
        save(options, document)
    for runner in models:
        if runner is not None:
            runner.close()  # with tensor parallelism, the other ranks' processes too
    del models
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def name_of(options: argparse.Namespace) -> str:
    """The model as tables name it: what is asked of the whole one is not asked of a rank."""
    experts = "" if options.quantization is QuantizationMethod.INT4 else f", {options.quantization.value} experts"
    return options.preset.value + experts + (f", one of {options.rank_of} ranks" if options.rank_of > 1 else "")


def load_models(settings: ServingSettings, num_ranks: int, pause_us: float) -> tuple[Any, Any]:
    """Target and draft; of rank 0 of `num_ranks` where that is more than one."""
    from kimi_backend.runners.load.loading import load_pair
    from slice_suite.one_of_ranks import load_one_of_ranks

    return load_pair(settings) if num_ranks == 1 else load_one_of_ranks(settings, num_ranks, pause_us)


def measure_served_depth(
    options: argparse.Namespace, folder: Path, num_layers: int, ceilings: Ceilings | None, document: dict[str, Any]
) -> None:
    """The same through the server, which loads the slice in its own processes."""
    from slice_suite.served import measure_served, running_server

    settings = slice_settings(options, folder, num_layers)
    document["pretences"] = list(settings.synthetic_parts)
    document["settings"] = settings_that_differ(settings)
    log_file = (options.out or folder) / f"server-{num_layers}-layers.log"
    log_file.parent.mkdir(parents=True, exist_ok=True)
    started = time.perf_counter()
    with running_server(settings, log_file) as served:
        document["seconds_to_ready"] = round(time.perf_counter() - started, 1)
        print(f"{num_layers} layers served after {document['seconds_to_ready']} s", flush=True)
        for case in cases(options):
            about = {"preset": options.preset.value, "num_layers": num_layers}
            try:
                result = measure_served(served, vocab_size(options.preset), num_output_tokens=options.tokens, **case)
            except RuntimeError as problem:
                result = case | {"error": str(problem)}
            document["cases"].append(about | result)
            print(json.dumps(result), flush=True)
            save(options, document)


def slice_settings(options: argparse.Namespace, folder: Path, num_layers: int) -> ServingSettings:
    """Room for the largest case, and whatever --set says."""
    num_gpus = int(dict(item.split("=", 1) for item in options.set).get("tensor_parallel_size", "1"))
    divided_by = max(1, options.rank_of // num_gpus) if num_gpus > 1 else 1
    target, draft = write_slice(folder, num_layers, options.preset, divided_by, num_gpus, options.quantization)
    longest = max(case["prompt_len"] for case in cases(options)) + options.tokens + MARGIN_TOKENS
    longest = max([longest] + [step.longest + MARGIN_TOKENS for step in options.prompt_steps])
    most = max(
        case["batch_size"] * (case["prompt_len"] + options.tokens + MARGIN_TOKENS + 64) for case in cases(options)
    )
    most = max([most] + [step.num_tokens for step in options.prompt_steps])
    values = {
        "checkpoint": str(target),
        "draft": str(draft),
        "load_format": "dummy",
        "routing": "uniform",
        "synthetic_acceptance": str(options.acceptance),
        "speculation_policy": "fixed",
        "max_model_len": str(longest),
        "kv_tokens": str(max(most, longest)),
        "max_num_seqs": str(max(options.batches + [step.num_decodes + 1 for step in options.prompt_steps])),
        "capture_batch_sizes": ",".join(map(str, options.batches)),
        "max_num_batched_tokens": str(PREFILL_ROWS),
        "max_speculative_tokens": str(max(options.ks)),
        "num_speculative_tokens": str(max(options.ks)),
    }
    values |= dict(item.split("=", 1) for item in options.set)
    return ServingSettings.from_parameters(values, {})


def settings_that_differ(settings: ServingSettings) -> dict[str, Any]:
    """Settings that differ from the defaults; folders left out."""
    default = ServingSettings()
    return {
        field.name: getattr(settings, field.name)
        for field in dataclasses.fields(settings)
        if getattr(settings, field.name) != getattr(default, field.name)
        and field.name not in ("checkpoint", "draft", "tokenizer")
    }


def save(options: argparse.Namespace, document: dict[str, Any]) -> None:
    """Write the document after every case, so that an interrupted run leaves what it has."""
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "slice.json").write_text(json.dumps(document, indent=1))


def draw(options: argparse.Namespace, document: dict[str, Any]) -> None:
    """Draw the picture of all cases; --tables draws an interrupted run's."""
    if options.out is None or not any("round_ms" in case for case in document["cases"]):
        return
    try:
        title = f"Kimi-K2.5 slice, {document['device']}, {document['date']}; {', '.join(document['pretences'])}"
        report.plot(document["cases"], options.out / "slice.png", title)
    except ImportError:
        print("no picture: matplotlib is not installed", file=sys.stderr)


if __name__ == "__main__":
    main()
