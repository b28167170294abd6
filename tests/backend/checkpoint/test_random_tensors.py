"""Random checkpoints: repeatable, sliceable, and with the variance that the model needs."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kimi_backend.checkpoint import random_tensors
from kimi_backend.checkpoint.model_specs import draft_tensor_specs, target_tensor_specs
from kimi_backend.checkpoint.presets import Architecture, DraftKind, Preset, draft_config_json, target_config_json
from kimi_backend.checkpoint.random_tensors import RandomTensors
from kimi_backend.checkpoint.tensor_spec import Specs
from kimi_backend.config.draft_config import Eagle3DraftConfig
from kimi_backend.config.model_config import KimiModelConfig
from kimi_backend.config.quantization_config import QuantizationMethod
from kimi_backend.errors import CheckpointError
from kimi_kernels.quantization.plain import dequantize
from kimi_kernels.weights import Fp8Weight, Int4Weight, Mxfp4Weight


def target_specs(quantization: QuantizationMethod) -> Specs:
    json = target_config_json(Preset.TINY, 2, quantization, Architecture.KIMI_K25, {})
    return target_tensor_specs(KimiModelConfig.from_hf_json(json))


def draft_specs(kind: DraftKind) -> Specs:
    json = target_config_json(Preset.TINY, 2, QuantizationMethod.NONE, Architecture.KIMI_K25, {})
    target = KimiModelConfig.from_hf_json(json)
    return draft_tensor_specs(Eagle3DraftConfig.from_hf_json(draft_config_json(kind, Preset.TINY, 2), target))


INT4 = RandomTensors(target_specs(QuantizationMethod.INT4), seed=7)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny tensors too are made of several chunks."""
    monkeypatch.setattr(random_tensors, "_CHUNK_ELEMENTS", 3000)


@given(name=st.sampled_from(sorted(INT4.names())), dim=st.integers(0, 1), data=st.data())
def test_a_slice_is_a_slice_of_the_whole(name: str, dim: int, data: st.DataObject) -> None:
    shape = INT4.shape(name)
    dim = min(dim, len(shape) - 1)
    start = data.draw(st.integers(0, shape[dim]))
    stop = data.draw(st.integers(start, shape[dim]))
    whole = INT4.read(name)
    assert whole.shape == shape
    assert whole.dtype == INT4.dtype(name)
    assert torch.equal(INT4.read(name, dim, start, stop), whole.narrow(dim, start, stop - start))


def test_seeds_and_names_matter() -> None:
    name, other = (
        "model.layers.1.mlp.experts.0.up_proj.weight_packed",
        "model.layers.1.mlp.experts.1.up_proj.weight_packed",
    )
    again = RandomTensors(INT4.specs, seed=7)
    assert torch.equal(INT4.read(name), again.read(name))
    assert not torch.equal(INT4.read(name), RandomTensors(INT4.specs, seed=8).read(name))
    assert not torch.equal(INT4.read(name), INT4.read(other))


def test_values_are_sane() -> None:
    hidden = 128
    assert INT4.read("model.norm.weight").unique().tolist() == [1.0]
    assert float(INT4.read("model.embed_tokens.weight").float().std()) == pytest.approx(1.0, rel=0.02)
    head = INT4.read("lm_head.weight").float()
    assert float(head.std()) == pytest.approx(hidden**-0.5, rel=0.02)
    assert float(head.mean()) == pytest.approx(0.0, abs=0.001)
    assert 0 < float(INT4.read("model.layers.1.mlp.gate.e_score_correction_bias").abs().max()) < 0.1
    shape = INT4.read("model.layers.1.mlp.experts.0.down_proj.weight_shape")
    assert shape.tolist() == [128, 256]


def test_quantised_experts_have_the_variance_of_plain_ones() -> None:
    expert = "model.layers.1.mlp.experts.3.down_proj"
    packed, scales = INT4.read(f"{expert}.weight_packed"), INT4.read(f"{expert}.weight_scale")
    plain = dequantize(Int4Weight(packed=packed, scales=scales, group_size=32))
    assert float(plain.float().std()) == pytest.approx(256**-0.5, rel=0.05)
    assert float(scales.min()) > 0
    fp8 = RandomTensors(target_specs(QuantizationMethod.FP8))
    values, scales = fp8.read(f"{expert}.weight"), fp8.read(f"{expert}.weight_scale_inv")
    plain = dequantize(Fp8Weight(values=values, scales=scales, block_size=128))
    assert float(plain.float().std()) == pytest.approx(256**-0.5, rel=0.3)  # two blocks: two random scales
    assert bool(torch.isfinite(plain).all())


def test_mxfp4_experts_have_the_variance_of_plain_ones() -> None:
    source = RandomTensors(target_specs(QuantizationMethod.MXFP4))
    expert = "model.layers.1.mlp.experts.3.down_proj"
    codes, scales = source.read(f"{expert}.weight"), source.read(f"{expert}.weight_scale")
    plain = dequantize(Mxfp4Weight(codes=codes, scales=scales))
    assert float(plain.std()) == pytest.approx(256**-0.5, rel=0.05)
    assert len(scales.unique()) == 2


def test_vocabulary_maps_agree() -> None:
    source = RandomTensors(draft_specs(DraftKind.MHA), seed=3)
    token_ids = torch.arange(512) + source.read("d2t")
    assert bool((token_ids[1:] > token_ids[:-1]).all())
    assert torch.equal(source.read("t2d").nonzero().flatten(), token_ids)
    assert torch.equal(source.read("t2d", 0, 100, 300), source.read("t2d")[100:300])


def test_an_unknown_name_is_named() -> None:
    with pytest.raises(CheckpointError, match=r"tensor 'lm_head\.bias' is missing"):
        INT4.read("lm_head.bias")
