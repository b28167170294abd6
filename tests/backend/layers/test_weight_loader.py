"""Slices of every format, by any number of ranks, put together again."""

import dataclasses
from dataclasses import dataclass

import pytest
import torch

from kimi_backend.checkpoint.tensor_source import InMemoryTensors
from kimi_backend.errors import CheckpointError
from kimi_backend.layers.expert_weights import load_experts
from kimi_backend.layers.weight_loader import Shard, WeightLoader
from kimi_kernels.kernel_set import KernelSet
from kimi_kernels.quantization.mxfp4 import dequantize_mxfp4, quantize_mxfp4
from kimi_kernels.weights import Fp8Weight, Int4Weight, Mxfp4Weight, Weight
from support.tiny_checkpoints import Tensors, dequantized, random_target
from support.tiny_configs import FP8_BLOCK_SIZE, INT4_GROUP_SIZE, target_config

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Rank:
    """A rank of a group that never communicates."""

    rank: int
    size: int
    all_reduce_norm: None = None

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        raise AssertionError("loading needs no collective")

    def all_gather_columns(self, x: torch.Tensor) -> torch.Tensor:
        raise AssertionError("loading needs no collective")

    def all_argmax(self, values: torch.Tensor, token_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        raise AssertionError("loading needs no collective")


def loader(tensors: Tensors, rank: int = 0, size: int = 1, dtype: torch.dtype = torch.float32) -> WeightLoader:
    return WeightLoader(
        InMemoryTensors(tensors),
        KernelSet.plain(),
        Rank(rank, size),
        CPU,
        dtype,
        fp8_block_size=FP8_BLOCK_SIZE,
        int4_group_size=INT4_GROUP_SIZE,
    )


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("shard", [Shard.ROWS, Shard.COLUMNS])
def test_fp8_slices_may_cut_blocks(size: int, shard: Shard) -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(96, 84, generator=generator).to(torch.float8_e4m3fn)
    tensors = {"a.weight": values, "a.weight_scale_inv": torch.rand(3, 3, generator=generator) + 0.5}
    dense = dequantized(tensors)["a.weight"]
    parts = [loader(tensors, rank, size).matrix("a", (96, 84), shard) for rank in range(size)]
    assert torch.equal(torch.cat(parts, dim=0 if shard is Shard.ROWS else 1), dense)


@pytest.mark.parametrize("shard", [Shard.ROWS, Shard.COLUMNS])
@pytest.mark.parametrize("name", ["weight", "weight_packed"])
def test_mxfp4_slices_are_those_of_the_widened_matrix(name: str, shard: Shard) -> None:
    """A rank of two has one group and a half of 96 columns."""
    weight = quantize_mxfp4(torch.randn(64, 96))
    tensors = {f"a.{name}": weight.codes, "a.weight_scale": weight.scales.view(torch.float8_e8m0fnu)}
    parts = [loader(tensors, rank, 2).matrix("a", (64, 96), shard) for rank in range(2)]
    assert torch.equal(torch.cat(parts, dim=0 if shard is Shard.ROWS else 1), dequantize_mxfp4(weight))


@pytest.mark.parametrize("shard", [Shard.ROWS, Shard.COLUMNS])
@pytest.mark.parametrize("shape", [(64,), (64, 1)])
def test_fp8_slices_with_a_scale_a_row(shape: tuple[int, ...], shard: Shard) -> None:
    values, scales = torch.randn(64, 48).to(torch.float8_e4m3fn), torch.rand(shape) + 0.5
    tensors = {"a.weight": values, "a.weight_scale": scales}
    parts = [loader(tensors, rank, 2).matrix("a", (64, 48), shard) for rank in range(2)]
    whole = values.float() * scales.reshape(64, 1)
    assert torch.equal(torch.cat(parts, dim=0 if shard is Shard.ROWS else 1), whole)


def test_weights_are_converted_by_value() -> None:
    tensors = {"a.weight": torch.tensor([[1.5, -2.0]], dtype=torch.float16), "n": torch.ones(3, dtype=torch.float16)}
    made = loader(tensors, dtype=torch.bfloat16)
    assert torch.equal(made.matrix("a", (1, 2)), torch.tensor([[1.5, -2.0]], dtype=torch.bfloat16))
    assert made.vector("n", 3).dtype == torch.bfloat16


@pytest.mark.parametrize("quantization", ["none", "int4", "fp8", "mxfp4", "mxfp4 packed"])
def test_expert_slices_of_two_ranks_are_the_whole(quantization: str) -> None:
    config = target_config(quantization, moe_intermediate_size=64)
    tensors = random_target(config)
    prefix = "model.layers.1.mlp.experts"
    parts = [
        load_experts(loader(tensors, rank, 2).scoped(prefix), config.n_routed_experts, 64, 64) for rank in range(2)
    ]
    dense = dequantized(tensors)
    for expert in range(config.n_routed_experts):
        for half, name in enumerate(("gate_proj", "up_proj")):
            rows = [dense_part(part.gate_up)[expert].chunk(2)[half] for part in parts]
            assert torch.equal(torch.cat(rows), dense[f"{prefix}.{expert}.{name}.weight"])
        columns = torch.cat([dense_part(part.down)[expert] for part in parts], dim=1)
        assert torch.equal(columns, dense[f"{prefix}.{expert}.down_proj.weight"])


def dense_part(weight: Weight) -> torch.Tensor:
    """[E, rows, columns] from the formats' formulas."""
    if isinstance(weight, Mxfp4Weight):
        return dequantize_mxfp4(weight)
    if isinstance(weight, Int4Weight):
        codes = torch.stack([(weight.packed >> shift) & 15 for shift in range(0, 32, 4)], dim=-1).flatten(-2) - 8
        return codes * weight.scales.float().repeat_interleave(weight.group_size, dim=2)
    if isinstance(weight, Fp8Weight):
        scales = weight.scales.repeat_interleave(weight.block_size, 1).repeat_interleave(weight.block_size, 2)
        return weight.values.float() * scales[:, : weight.values.shape[1], : weight.values.shape[2]]
    return weight


def test_quantized_experts_stay_as_stored() -> None:
    kinds = {"int4": (Int4Weight, torch.int32), "fp8": (Fp8Weight, torch.float8_e4m3fn)}
    kinds |= dict.fromkeys(("mxfp4", "mxfp4 packed"), (Mxfp4Weight, torch.uint8))
    for quantization, (kind, dtype) in kinds.items():
        config = target_config(quantization)
        made = loader(random_target(config)).scoped("model.layers.1.mlp.experts")
        down = load_experts(made, config.n_routed_experts, 64, 32).down
        assert isinstance(down, kind)
        assert isinstance(down, Int4Weight | Fp8Weight | Mxfp4Weight)
        fields = dict.fromkeys(dataclasses.asdict(down))
        assert getattr(down, next(iter(fields))).dtype == dtype


def test_a_slice_that_would_cut_a_quantisation_block_is_refused() -> None:
    config = target_config("fp8")
    made = loader(random_target(config), 0, 2).scoped("model.layers.1.mlp.experts")
    with pytest.raises(CheckpointError, match=r"32 elements do not divide among 2 ranks .* multiples of 32"):
        load_experts(made, config.n_routed_experts, 64, 32)


def test_heads_that_do_not_divide_are_refused() -> None:
    with pytest.raises(CheckpointError, match="heads: 5 elements do not divide among 2 ranks"):
        loader({}, 0, 2).bounds("heads", 5)


def test_a_misshapen_tensor_is_named() -> None:
    with pytest.raises(CheckpointError, match=r"a\.weight: expected shape \[4, 2\], found \[2, 4\]"):
        loader({"a.weight": torch.zeros(2, 4)}).matrix("a", (4, 2))
    with pytest.raises(CheckpointError, match=r"n: expected shape \[4\], found \[3\]"):
        loader({"n": torch.zeros(3)}).vector("n", 4)
