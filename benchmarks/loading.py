"""Measure how fast a rank reads Kimi-K2.5's files, what of it is Python, and how much memory the host needs.

The checkpoint is sparse files of the real sizes, 553 GiB in the order of layers, that take a few megabytes of disk:
what a disk adds is not in the figures, what the loader adds is. All headers are read, and as many layers as are asked
for.

    python benchmarks/loading.py --layers 3 --tp 8
"""

import argparse
import json
import resource
import struct
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from kimi_backend.checkpoint.loading import TargetCheckpoint
from kimi_backend.checkpoint.model_specs import target_tensor_specs
from kimi_backend.checkpoint.presets import Architecture, Preset, target_config_json
from kimi_backend.checkpoint.safetensors_source import INDEX_FILE, TEXT_PREFIX, TORCH_DTYPES
from kimi_backend.checkpoint.tensor_source import SourceWrapper, TensorSource
from kimi_backend.checkpoint.tensor_spec import Specs
from kimi_backend.config.model_config import KimiModelConfig
from kimi_backend.config.quantization_config import QuantizationMethod
from kimi_backend.models.kimi_k25 import DecoderLayer, target_loader
from kimi_backend.parallel import SingleRank
from kimi_kernels.kernel_set import KernelSet

GIB = 1 << 30
NUM_LAYERS = 61
SHARD_BYTES = 9 * 10**9
DTYPE_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


@dataclass(frozen=True, slots=True)
class OneOfRanks(SingleRank):
    """Rank 0 of so many: it reads its slices and waits for nobody."""

    size: int = 8


@dataclass(slots=True)
class Watched(SourceWrapper):
    """Counts the bytes read, and how often a read goes on behind the one before."""

    source: TensorSource
    place: dict[str, int]
    """The place of each tensor in the order of the files."""
    num_bytes: int = 0
    num_reads: int = 0
    num_forward: int = 0
    last: int = field(default=-1)

    def read(self, name: str, dim: int = 0, start: int = 0, stop: int | None = None) -> torch.Tensor:
        tensor = self.source.read(name, dim, start, stop)
        self.num_bytes += tensor.numel() * tensor.element_size()
        self.num_reads += 1
        self.num_forward += self.place[name] > self.last
        self.last = self.place[name]
        return tensor


def write_sparse(folder: Path, specs: Specs) -> list[str]:
    """Files whose data are holes; returns the stored names in their order."""
    shards: list[list[str]] = [[]]
    size = 0
    for name, spec in specs.items():
        if size + spec.num_bytes > SHARD_BYTES:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += spec.num_bytes
    weight_map = {}
    for index, names in enumerate(shards):
        file = folder / f"model-{index + 1:05d}-of-{len(shards):06d}.safetensors"
        header, offset = {}, 0
        for name in sorted(names, key=lambda name: -specs[name].dtypes[0].itemsize):
            end = offset + specs[name].num_bytes
            dtype = DTYPE_NAMES[specs[name].dtypes[0]]
            header[TEXT_PREFIX + name] = {"dtype": dtype, "shape": specs[name].shape, "data_offsets": [offset, end]}
            weight_map[TEXT_PREFIX + name] = file.name
            offset = end
        text = json.dumps(header).encode()
        with file.open("wb") as stream:
            stream.write(struct.pack("<Q", len(text)) + text)
            stream.truncate(8 + len(text) + offset)
    (folder / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return [name.removeprefix(TEXT_PREFIX) for name in weight_map]


def memory_gib() -> tuple[float, float]:
    """This process's own memory, and its part of mapped files, in GiB."""
    fields = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    return tuple(int(fields[name].split()[0]) / (1 << 20) for name in ("RssAnon", "RssFile"))  # type: ignore[return-value]


def read_layers(checkpoint: TargetCheckpoint, order: list[str], layers: range, tp_size: int) -> Iterator[str]:
    """A line for each layer that the loader has read; its weights are dropped then, as a GPU takes them."""
    raw = replace(KernelSet.plain(), pack_linear=lambda weight: weight, pack_experts=lambda weights: weights)
    place = {name: index for index, name in enumerate(order)}
    cos_sin = torch.zeros(1)
    for layer in layers:
        watched = Watched(checkpoint.tensors, place)
        group = OneOfRanks(size=tp_size)
        loader = target_loader(checkpoint.config, watched, raw, group, torch.device("cpu"), torch.bfloat16)
        start = time.perf_counter()
        DecoderLayer(checkpoint.config, layer, loader.scoped(f"model.layers.{layer}"), cos_sin)
        seconds = time.perf_counter() - start
        own, mapped = memory_gib()
        yield (
            f"layer {layer:2d}: {seconds:6.2f} s, {watched.num_bytes / GIB:.2f} GiB kept, {watched.num_reads} reads,"
            f" {watched.num_forward / watched.num_reads:.0%} in file order, {own:.2f} GiB own, {mapped:.2f} GiB mapped"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--layers", type=int, default=3, help="expert layers to read")
    parser.add_argument("--tp", type=int, default=8)
    parser.add_argument("--folder", type=Path, help="where the sparse files go; removed afterwards")
    options = parser.parse_args()
    token_ids = {"bos_token_id": 163584, "eos_token_id": 163585, "pad_token_id": 163839}
    fields = target_config_json(Preset.KIMI_K25, NUM_LAYERS, QuantizationMethod.INT4, Architecture.KIMI_K25, token_ids)
    specs = target_tensor_specs(KimiModelConfig.from_hf_json(fields))
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        (folder / "config.json").write_text(json.dumps(fields))
        order = write_sparse(folder, specs)
        start = time.perf_counter()
        checkpoint = TargetCheckpoint.open(folder)
        print(
            f"opened and checked: {time.perf_counter() - start:.2f} s, {len(order)} tensors,"
            f" {checkpoint.num_bytes / GIB:.0f} GiB in {len(list(folder.glob('*.safetensors')))} files"
        )
        for line in read_layers(checkpoint, order, range(1, 1 + options.layers), options.tp):
            print(line, flush=True)
    print(f"peak memory {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 << 20):.2f} GiB")


if __name__ == "__main__":
    main()
