"""Time a draft step by the format of the draft's weights and by the tokens that its head keeps.

    PYTHONPATH=kernels:backend:benchmarks python benchmarks/draft_cost.py --out results [--rows 1,4] [--formats int4]

The draft of Kimi-K2.5 (MLA, width 7168, 163,840 tokens) with random weights. For each variant: one single-row step of
B sequences (layer, head, argmax) and the head with its argmax alone, both as replayed CUDA graphs; and the rows of a
prompt (fc and layer). The floor is what the step must read of weights and KV, at the read bandwidth of this very run.
What a variant costs in acceptance is another question: benchmarks/draft_acceptance.py.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kernel_cases.ceilings import discard_reason, measure_ceilings
from kimi_backend.checkpoint.loading import DraftCheckpoint
from kimi_backend.checkpoint.model_specs import draft_tensor_specs
from kimi_backend.checkpoint.presets import (
    Architecture,
    DraftKind,
    Preset,
    draft_config_json,
    target_config_json,
)
from kimi_backend.checkpoint.random_tensors import RandomTensors
from kimi_backend.checkpoint.token_counts import TokenCounts
from kimi_backend.config.draft_config import Eagle3DraftConfig, Eagle3MlaDraftConfig
from kimi_backend.config.linear_format import LinearFormat
from kimi_backend.config.model_config import KimiModelConfig
from kimi_backend.config.quantization_config import QuantizationMethod
from kimi_backend.config.weight_sizes import WeightFormat, draft_weight_bytes
from kimi_backend.models.eagle3_mla import Eagle3MlaDraft
from kimi_backend.models.reduced_vocabulary import reduce_vocabulary
from kimi_backend.parallel import SingleRank
from kimi_backend.runners.metadata_builder import MetadataBuilder
from kimi_kernels.kernel_set import KernelSet

NUM_REPLAYS = 50
STEPS_A_GRAPH = 3
CONTEXT = 1024
BLOCK_SIZE = 64
PROMPT_ROWS = (128, 2048, 8192)
REDUCED = 32_768


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    linear_format: LinearFormat
    head_format: LinearFormat
    num_tokens: int

    @property
    def name(self) -> str:
        kept = "full head" if not self.num_tokens else f"{self.num_tokens:,} tokens"
        layer, head = ("bf16" if f is LinearFormat.NONE else f.value for f in (self.linear_format, self.head_format))
        return f"{layer}{'' if head == layer else f' + {head} head'}, {kept}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the table; microseconds."""

    variant: str
    what: str
    rows: int
    floor_us: float
    time_us: float

    def __str__(self) -> str:
        of_floor = f"{self.time_us / self.floor_us:5.2f}" if self.floor_us else "    -"
        return f"{self.variant:30} {self.what:7} {self.rows:6} {self.floor_us:9.1f} {self.time_us:9.1f} {of_floor}"


VARIANTS = tuple(
    Variant(linear_format=linear_format, head_format=head_format, num_tokens=num_tokens)
    for num_tokens in (0, REDUCED)
    for linear_format, head_format in (
        *((same, same) for same in LinearFormat),
        (LinearFormat.NONE, LinearFormat.INT4),
        (LinearFormat.FP8, LinearFormat.INT4),
    )
)


def open_draft(device: torch.device, preset: Preset) -> DraftCheckpoint:
    """Random weights of the published draft's geometry."""
    target_json = target_config_json(preset, 2, QuantizationMethod.INT4, Architecture.KIMI_K25, {})
    target = KimiModelConfig.from_hf_json(target_json)
    config = Eagle3DraftConfig.from_hf_json(draft_config_json(DraftKind.MLA, preset, 2), target)
    source = RandomTensors(draft_tensor_specs(config), 0, device)
    return DraftCheckpoint(Path("random"), config, source, source, 0)


def load(draft: DraftCheckpoint, variant: Variant, kernels: KernelSet, device: torch.device) -> Eagle3MlaDraft:
    if variant.num_tokens:
        nothing_counted = TokenCounts(draft.config.vocab_size, (), ())
        draft = reduce_vocabulary(draft, draft.tensors, variant.num_tokens, nothing_counted)
    assert isinstance(draft.config, Eagle3MlaDraftConfig)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    formats = variant.linear_format, variant.head_format
    return Eagle3MlaDraft(draft.config, draft.tensors, kernels, SingleRank(), device, dtype, *formats)


class Steps:
    """One variant with what its steps read."""

    def __init__(self, model: Eagle3MlaDraft, kernels: KernelSet, device: torch.device, max_sequences: int) -> None:
        self.model = model
        self.device = device
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.builder = MetadataBuilder(kernels=kernels, block_size=BLOCK_SIZE, num_mla_heads=model.num_mla_heads)
        longest = min(max(CONTEXT + BLOCK_SIZE, *PROMPT_ROWS), model.config.max_position_embeddings)
        self.blocks_a_sequence = -(-longest // BLOCK_SIZE)
        num_blocks = self.blocks_a_sequence * max_sequences
        self.cache = torch.randn(model.kv_pool_shape(num_blocks, BLOCK_SIZE), device=device).to(self.dtype)
        table = torch.randperm(num_blocks, device=device).to(torch.int32)
        self.table = table.view(max_sequences, self.blocks_a_sequence)
        self.generator = torch.Generator(device).manual_seed(0)

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, device=self.device, generator=self.generator).to(self.dtype)

    def single(self, num_sequences: int) -> Callable[[], object]:
        """STEPS_A_GRAPH single-row steps, each reading what the one before it fed back and drew."""
        config = self.model.config
        ids = torch.randint(config.vocab_size, (num_sequences,), device=self.device, generator=self.generator)
        hidden = self.random(num_sequences, config.hidden_size)
        lengths = torch.full((num_sequences,), CONTEXT, dtype=torch.int32, device=self.device)
        writes = torch.ones(num_sequences, dtype=torch.bool, device=self.device)

        def steps() -> object:
            token_ids, state = ids, hidden
            for step in range(STEPS_A_GRAPH):
                metadata = self.builder.build_single_rows(
                    lengths + step, self.table[:num_sequences], writes, CONTEXT + step
                )
                normed, state = self.model.forward(token_ids, state, metadata, self.cache)
                _, token_ids = self.model.argmax(normed)
            return token_ids

        return steps

    def head(self, num_sequences: int) -> Callable[[], object]:
        normed = self.random(num_sequences, self.model.config.hidden_size)
        return lambda: [self.model.argmax(normed) for _ in range(STEPS_A_GRAPH)]

    def prompt(self, num_rows: int) -> Callable[[], object]:
        """fc and layer over the rows of one prompt."""
        config = self.model.config
        aux = self.random(num_rows, config.num_aux_hidden_states * config.target_hidden_size)
        ids = torch.randint(config.vocab_size, (num_rows,), device=self.device, generator=self.generator)
        lengths = np.array([num_rows], np.int32)
        on_device = torch.from_numpy(lengths).to(self.device)
        metadata = self.builder.build(on_device, on_device, self.table[:1], lengths, lengths)
        return lambda: self.model.forward(ids, self.model.combine_aux(aux), metadata, self.cache)


def measure(
    variant: Variant, draft: DraftCheckpoint, counts: list[int], bytes_per_us: float, device: torch.device
) -> Iterator[Row]:
    """Load one variant and time everything."""
    kernels = KernelSet.triton() if device.type == "cuda" else KernelSet.plain()
    steps = Steps(load(draft, variant, kernels, device), kernels, device, max(counts))
    weights = WeightFormat(draft_format=variant.linear_format, draft_head_format=variant.head_format)
    config = steps.model.config
    layer_bytes = draft_weight_bytes(config, weights, has_embed=False, has_head=False)
    fc = variant.linear_format.num_bytes(
        config.hidden_size, config.num_aux_hidden_states * config.target_hidden_size, 2
    )
    rope_bytes = config.max_position_embeddings * config.qk_rope_head_dim * 4
    layer_bytes -= fc + rope_bytes
    head_bytes = variant.head_format.num_bytes(config.draft_vocab_size, config.hidden_size, 2)
    for count in counts:
        kv_bytes = count * CONTEXT * config.latent_dim * 2
        for what, call, num_bytes in (
            ("step", steps.single(count), layer_bytes + head_bytes + kv_bytes),
            ("head", steps.head(count), head_bytes),
        ):
            time_us = graph_us(call) / STEPS_A_GRAPH if device.type == "cuda" else _smoke(call)
            yield Row(variant=variant.name, what=what, rows=count, floor_us=num_bytes / bytes_per_us, time_us=time_us)
    for num_rows in [rows for rows in PROMPT_ROWS if rows <= config.max_position_embeddings]:
        call = steps.prompt(num_rows)
        time_us = eager_us(call) if device.type == "cuda" else _smoke(call)
        yield Row(variant=variant.name, what="prompt", rows=num_rows, floor_us=0.0, time_us=time_us)


def graph_us(call: Callable[[], object]) -> float:
    """Median of replays."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return eager_us(graph.replay)


def eager_us(call: Callable[[], object]) -> float:
    times = []
    for index in range(NUM_REPLAYS + 5):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        end.synchronize()
        if index >= 5:
            times.append(start.elapsed_time(end) * 1e3)
    return statistics.median(times)


def _smoke(call: Callable[[], object]) -> float:
    call()
    return 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rows", default="1,4,16,64", help="sequences in a step, separated by commas")
    parser.add_argument("--formats", default="none,fp8,int4", help="formats to measure, separated by commas")
    parser.add_argument("--out", type=Path, help="folder for draft_cost.json")
    parser.add_argument("--smoke", action="store_true", help="a tiny draft on the CPU: does it run?")
    options = parser.parse_args()
    counts = [int(part) for part in options.rows.split(",")]
    report: dict[str, Any] = {"command": " ".join(sys.argv), "date": time.strftime("%Y-%m-%d"), "rows": []}
    device = torch.device("cpu" if options.smoke else "cuda")
    bytes_per_us = 1.0
    if not options.smoke:
        card, ceilings = torch.cuda.get_device_name(), measure_ceilings()
        bytes_per_us = ceilings.read_bytes_per_us
        report |= {"card": card, "torch": torch.__version__, "ceilings": asdict(ceilings)}
        report["discarded"] = discard_reason(card, ceilings)
        print(f"{card}: reads {bytes_per_us / 1e6:.2f} TB/s, {ceilings.matmul_flops_per_us / 1e6:.0f} TFLOP/s")
    draft = open_draft(device, Preset.TINY if options.smoke else Preset.KIMI_K25)
    print(f"{'variant':30} {'what':7} {'rows':>6} {'floor µs':>9} {'µs':>9} of floor", flush=True)
    with torch.inference_mode():
        formats = [LinearFormat(name) for name in options.formats.split(",")]
        for variant in [variant for variant in VARIANTS if variant.linear_format in formats]:
            reduced = min(variant.num_tokens, draft.config.vocab_size // 2)
            chosen = replace(variant, num_tokens=reduced)
            for row in measure(chosen, draft, counts, bytes_per_us, device):
                print(row, flush=True)
                report["rows"].append(asdict(row))
            if device.type == "cuda":
                torch.cuda.empty_cache()
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "draft_cost.json").write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
