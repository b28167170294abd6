"""Models from files equal models from memory, bit for bit: what is written is what is computed with."""

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from kimi_backend.checkpoint.loading import DraftCheckpoint, TargetCheckpoint
from kimi_backend.checkpoint.model_specs import draft_tensor_specs, target_tensor_specs
from kimi_backend.checkpoint.presets import Architecture, DraftKind
from kimi_backend.checkpoint.progress import WatchedTensors
from kimi_backend.checkpoint.random_tensors import RandomTensors
from kimi_backend.checkpoint.safetensors_source import SINGLE_FILE
from kimi_backend.checkpoint.tensor_source import InMemoryTensors, TensorSource
from kimi_backend.config.draft_config import Eagle3MlaDraftConfig
from kimi_backend.config.quantization_config import QuantizationMethod
from kimi_backend.models.eagle3_draft import Eagle3Draft
from kimi_backend.models.eagle3_mha import Eagle3MhaDraft
from kimi_backend.models.eagle3_mla import Eagle3MlaDraft
from kimi_backend.models.kimi_k25 import KimiTarget
from kimi_backend.parallel import SingleRank
from kimi_kernels.kernel_set import KernelSet
from support.checkpoint_folders import PREFIX, copy_folder, edit_json, edit_weights, make_tiny, shard
from support.draft_steps import DraftSteps
from support.target_steps import TargetSteps

CPU = torch.device("cpu")
KERNELS = KernelSet.plain()
TOKENS = [3, 1500, 77, 2047, 256, 9]


def target_logits(checkpoint: TargetCheckpoint, source: TensorSource) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits and aux hidden states of a short prompt."""
    target = KimiTarget(checkpoint.config, source, KERNELS, SingleRank(), CPU, torch.float32)
    return TargetSteps(target, KERNELS, [16], aux_layer_ids=(0, 1, 2)).run(TOKENS, [4, 2])


def draft_logits(checkpoint: DraftCheckpoint, source: TensorSource, aux: torch.Tensor | None = None) -> torch.Tensor:
    """Logits over the same prompt, from the target's aux hidden states or from random ones."""
    build: type[Eagle3Draft] = Eagle3MlaDraft if isinstance(checkpoint.config, Eagle3MlaDraftConfig) else Eagle3MhaDraft
    draft = build(checkpoint.config, source, KERNELS, SingleRank(), CPU, torch.float32)  # type: ignore[arg-type]
    if aux is None:
        aux = torch.randn(len(TOKENS), 3 * 128, generator=torch.Generator().manual_seed(5))
    logits, _ = DraftSteps(draft, [16]).step([(0, TOKENS)], [draft.combine_aux(aux)])
    return logits[0]


@pytest.mark.parametrize("architecture", Architecture)
@pytest.mark.parametrize("quantization", QuantizationMethod)
def test_a_target_from_files_equals_the_one_in_memory(
    tmp_path: Path, architecture: Architecture, quantization: QuantizationMethod
) -> None:
    folder = make_tiny(tmp_path / "out", quantization, architecture=architecture, shard_bytes=500_000)
    assert len(list(folder.glob("*.safetensors"))) > 2
    checkpoint = TargetCheckpoint.open(folder)
    assert checkpoint.config.quantization.method is quantization
    in_memory = RandomTensors(target_tensor_specs(checkpoint.config), seed=0)
    with checkpoint.loading() as tensors:
        found = target_logits(checkpoint, tensors)
    expected = target_logits(checkpoint, in_memory)
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])
    assert bool(torch.isfinite(found[0]).all())
    assert float(found[0].std()) == pytest.approx(1.0, rel=0.2)  # a head of N(0, 1 / H) on normed states


@pytest.mark.parametrize("architecture", Architecture)
@pytest.mark.parametrize("quantization", QuantizationMethod)
@pytest.mark.parametrize("kind", DraftKind)
def test_a_draft_from_files_equals_the_one_in_memory(
    tmp_path: Path, kind: DraftKind, quantization: QuantizationMethod, architecture: Architecture
) -> None:
    """Every pair that can be made: the draft reads what its own target, from files too, hands on."""
    folder = make_tiny(tmp_path / "out", quantization, kind, architecture=architecture)
    target = TargetCheckpoint.open(folder)
    aux = target_logits(target, target.tensors)[1]
    checkpoint = DraftCheckpoint.open(folder / "draft", target.config)
    assert checkpoint.config.fc_norm == checkpoint.config.norm_output == (kind is DraftKind.MLA31)
    specs = draft_tensor_specs(checkpoint.config)
    names = checkpoint.tensors.names()
    in_memory = RandomTensors(specs, seed=1)
    with checkpoint.loading() as tensors:
        found = draft_logits(checkpoint, tensors, aux)
    expected = draft_logits(checkpoint, InMemoryTensors({name: in_memory.read(name) for name in names}), aux)
    assert torch.equal(found, expected)
    assert found.shape == (len(TOKENS), checkpoint.config.draft_vocab_size)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("plain") / "out", QuantizationMethod.NONE)


def rewrite(folder: Path, change: Callable[[str, torch.Tensor], tuple[str, torch.Tensor]]) -> None:
    """Replace every tensor of a single-file checkpoint."""
    tensors = dict(change(name, tensor) for name, tensor in load_file(folder / SINGLE_FILE).items())
    save_file(tensors, folder / SINGLE_FILE)


def add(folder: Path, name: str) -> None:
    edit_weights(folder, lambda tensors: tensors.update({name: torch.full((3,), math.nan)}))


CHANGES: dict[str, Callable[[Path], object]] = {
    "sharded with an index": shard,
    "sharded without an index": lambda folder: shard(folder, with_index=False),
    "without the prefix": lambda folder: rewrite(folder, lambda name, tensor: (name.removeprefix(PREFIX), tensor)),
    "float32": lambda folder: rewrite(folder, lambda name, tensor: (name, tensor.float())),
    "with a vision tower": lambda folder: add(folder, "vision_tower.patch_embed.weight"),
    "with a projector": lambda folder: add(folder, "mm_projector.proj.0.weight"),
    "with rotary buffers": lambda folder: add(folder, f"{PREFIX}model.layers.0.self_attn.rotary_emb.inv_freq"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_the_same_target_in_another_file_layout_computes_the_same(plain: Path, tmp_path: Path, change: str) -> None:
    expected = target_logits(TargetCheckpoint.open(plain), TargetCheckpoint.open(plain).tensors)
    folder = copy_folder(plain, tmp_path / "changed")
    CHANGES[change](folder)
    checkpoint = TargetCheckpoint.open(folder)
    assert torch.equal(target_logits(checkpoint, checkpoint.tensors)[0], expected[0])


def test_fp16_files_are_read_by_value(plain: Path, tmp_path: Path) -> None:
    folder = copy_folder(plain, tmp_path / "half")
    halves = {name: tensor.half() for name, tensor in load_file(folder / SINGLE_FILE).items()}
    save_file(halves, folder / SINGLE_FILE)
    checkpoint = TargetCheckpoint.open(folder)
    found = target_logits(checkpoint, checkpoint.tensors)[0]
    as_float = {name.removeprefix(PREFIX): tensor.float() for name, tensor in halves.items()}
    assert torch.equal(found, target_logits(checkpoint, InMemoryTensors(as_float))[0])


@pytest.mark.parametrize("layer", ["layers.0.", "midlayer.", "model.layers.0."])
def test_a_drafts_layer_may_have_any_of_its_names(plain: Path, tmp_path: Path, layer: str) -> None:
    target = TargetCheckpoint.open(plain)
    original = DraftCheckpoint.open(plain / "draft", target.config)
    folder = copy_folder(plain / "draft", tmp_path / "renamed")
    rewrite(folder, lambda name, tensor: (name.replace("midlayer.", layer), tensor))
    renamed = DraftCheckpoint.open(folder, target.config)
    assert torch.equal(draft_logits(renamed, renamed.tensors), draft_logits(original, original.tensors))


def test_a_reduced_draft_needs_only_one_of_its_two_maps(plain: Path, tmp_path: Path) -> None:
    target = TargetCheckpoint.open(plain)
    for kept in ("d2t", "t2d"):
        folder = copy_folder(plain / "draft", tmp_path / kept)
        tensors = load_file(folder / SINGLE_FILE)
        del tensors[{"d2t": "t2d", "t2d": "d2t"}[kept]]
        save_file(tensors, folder / SINGLE_FILE)
        assert kept in DraftCheckpoint.open(folder, target.config).tensors.names()


def test_a_full_vocabulary_draft_may_bring_an_identity_map(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path / "out", QuantizationMethod.NONE, DraftKind.MLA)
    target = TargetCheckpoint.open(folder)
    original = DraftCheckpoint.open(folder / "draft", target.config)
    expected = draft_logits(original, original.tensors)
    tensors = load_file(folder / "draft" / SINGLE_FILE)
    tensors["d2t"] = torch.zeros(2048, dtype=torch.int64)
    tensors["t2d"] = torch.ones(2048, dtype=torch.bool)
    save_file(tensors, folder / "draft" / SINGLE_FILE)
    changed = DraftCheckpoint.open(folder / "draft", target.config)
    assert torch.equal(draft_logits(changed, changed.tensors), expected)


@pytest.mark.parametrize("quantization", QuantizationMethod)
def test_a_rank_reads_only_its_part(tmp_path: Path, quantization: QuantizationMethod) -> None:
    folder = make_tiny(tmp_path / "out", quantization, architecture=Architecture.DEEPSEEK_V3)
    checkpoint = TargetCheckpoint.open(folder)
    read: list[int] = []
    for rank in range(2):
        source = WatchedTensors(checkpoint.tensors, read.append)
        KimiTarget(checkpoint.config, source, KERNELS, SingleRank(rank=rank, size=2), CPU, torch.float32)
    # Both together read the file once, and what every rank holds whole a second time; weight_shape is read by none.
    attention = 2 * (144 * 128 + 64 + 64) * 2  # down-projections and their norms, bf16 (or fp8, half of it)
    norms_and_router = (5 * 128 + 16 * 128) * 2 + 16 * 4
    shapes = 16 * 3 * 2 * 4 if quantization is QuantizationMethod.INT4 else 0
    excess = sum(read) - (checkpoint.num_bytes - shapes)
    assert 0 < excess <= attention + norms_and_router + 200


def test_transformers_reads_the_same_model_from_the_files(tmp_path: Path) -> None:
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    folder = make_tiny(tmp_path / "out", QuantizationMethod.NONE, architecture=Architecture.DEEPSEEK_V3)
    checkpoint = TargetCheckpoint.open(folder)
    expected = target_logits(checkpoint, checkpoint.tensors)[0]
    edit_json(folder / "config.json", lambda config: config.update(model_type="deepseek_v3"))
    config = DeepseekV3Config.from_pretrained(folder)
    model, info = DeepseekV3ForCausalLM.from_pretrained(
        folder, config=config, dtype=torch.float32, output_loading_info=True
    )
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    with torch.no_grad():
        found = model(torch.tensor([TOKENS])).logits[0]
    assert float((found - expected).abs().max() / expected.abs().max()) < 1e-4
