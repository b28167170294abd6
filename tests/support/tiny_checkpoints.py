"""Random checkpoints of tiny models, with the names, shapes and formats of real ones.

Norm weights are near 1, biases of the router near 0, every other weight N(0, 1 / fan_in): activations keep their size
through the layers, and the router spreads tokens over experts.
"""

import torch

from kimi_backend.config.draft_config import Eagle3MhaDraftConfig, Eagle3MlaDraftConfig
from kimi_backend.config.mla_dims import MlaDims
from kimi_backend.config.model_config import KimiModelConfig
from kimi_backend.config.quantization_config import QuantizationMethod
from kimi_kernels.quantization.mxfp4 import quantize_mxfp4
from support.tiny_configs import FP8_BLOCK_SIZE, INT4_GROUP_SIZE

FP8_MAX = 448.0

Tensors = dict[str, torch.Tensor]


class _Random:
    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self._generator)

    def matrix(self, out_features: int, in_features: int) -> torch.Tensor:
        return self.normal(out_features, in_features) * in_features**-0.5

    def norm(self, size: int) -> torch.Tensor:
        return 1 + 0.1 * self.normal(size)

    def increasing(self, count: int, limit: int) -> torch.Tensor:
        """count distinct ids below limit, lowest first."""
        return torch.randperm(limit, generator=self._generator)[:count].sort().values


def random_target(config: KimiModelConfig, seed: int = 0) -> Tensors:
    """A checkpoint that fits the config, quantised as it says."""
    random = _Random(seed)
    tensors = {
        "model.embed_tokens.weight": random.normal(config.vocab_size, config.hidden_size),
        "model.norm.weight": random.norm(config.hidden_size),
        "lm_head.weight": random.matrix(config.vocab_size, config.hidden_size),
    }
    for layer in range(config.num_hidden_layers):
        prefix = f"model.layers.{layer}."
        tensors[prefix + "input_layernorm.weight"] = random.norm(config.hidden_size)
        tensors[prefix + "post_attention_layernorm.weight"] = random.norm(config.hidden_size)
        tensors |= _mla(random, prefix + "self_attn.", config, config.hidden_size, config.hidden_size)
        if config.is_moe_layer(layer):
            tensors |= _moe(random, prefix + "mlp.", config)
        else:
            tensors |= _mlp(random, prefix + "mlp.", config.hidden_size, config.intermediate_size)
    return _quantize(tensors, config)


def random_draft(
    config: Eagle3MlaDraftConfig | Eagle3MhaDraftConfig,
    seed: int = 1,
    *,
    with_embed: bool = True,
    with_head: bool = True,
    layer_prefix: str = "layers.0.",
) -> Tensors:
    """A checkpoint that fits the config; d2t and t2d when its vocabulary is smaller than the target's.

    Args:
        layer_prefix: what the first layer is called.
    """
    random = _Random(seed)
    hidden, aux_width = config.hidden_size, config.num_aux_hidden_states * config.target_hidden_size
    tensors = {"fc.weight": random.matrix(hidden, aux_width)}
    for index in range(config.num_hidden_layers):
        layer = f"layers.{index}." if index else layer_prefix
        input_size = hidden if index else 2 * hidden
        tensors[layer + "input_layernorm.weight"] = random.norm(hidden)
        if index == 0:
            tensors[layer + "hidden_norm.weight"] = random.norm(hidden)
        tensors[layer + "post_attention_layernorm.weight"] = random.norm(hidden)
        if index == 0:
            tensors["norm.weight"] = random.norm(hidden)
        tensors |= _mlp(random, layer + "mlp.", hidden, config.intermediate_size)
        if isinstance(config, Eagle3MlaDraftConfig):
            tensors |= _mla(random, layer + "self_attn.", config, hidden, input_size)
        else:
            tensors |= _mha(random, layer + "self_attn.", config, input_size)
    if config.norm_before_fc:
        tensors["input_norm.weight"] = random.norm(aux_width)
    if config.fc_norm:
        for chunk in range(config.num_aux_hidden_states):
            tensors[f"fc_norm.{chunk}.weight"] = random.norm(config.target_hidden_size)
    if with_embed:
        tensors["embed_tokens.weight"] = random.normal(config.vocab_size, hidden)
    if with_head:
        tensors["lm_head.weight"] = random.matrix(config.draft_vocab_size, hidden)
    if config.draft_vocab_size < config.vocab_size:
        token_ids = random.increasing(config.draft_vocab_size, config.vocab_size)
        tensors["d2t"] = token_ids - torch.arange(config.draft_vocab_size)
        tensors["t2d"] = torch.zeros(config.vocab_size, dtype=torch.bool).index_fill(0, token_ids, True)
    return tensors


def with_biases(tensors: Tensors, seed: int = 9) -> Tensors:
    """The same draft with a bias beside every matrix and norm that may have one."""
    random = _Random(seed)
    biases = {}
    for name, tensor in tensors.items():
        module = name.removesuffix(".weight")
        if module != name and not module.endswith(
            ("embed_tokens", "lm_head", "kv_b_proj", "kv_a_layernorm", "q_a_layernorm")
        ):
            biases[f"{module}.bias"] = 0.5 * random.normal(tensor.shape[0])
    return {**tensors, **biases}


def quantize_fp8(tensors: Tensors) -> Tensors:
    """The same draft with every matrix but the vocabulary's in fp8."""
    stored: Tensors = {}
    for name, tensor in tensors.items():
        is_linear = tensor.ndim == 2 and not name.startswith(("embed_tokens", "lm_head"))
        stored |= _fp8(name, tensor, f"{name}_scale_inv") if is_linear else {name: tensor}
    return stored


def fp8_with_scales(name: str, weight: torch.Tensor, largest: torch.Tensor) -> Tensors:
    """largest: magnitudes that e4m3's largest value stands for, of the shape of the scales."""
    scales = largest / FP8_MAX
    return {name: (weight / scales).to(torch.float8_e4m3fn), f"{name}_scale": scales}


def dequantized(tensors: Tensors) -> Tensors:
    """The same checkpoint with every weight dense, in float32, from the formats' formulas."""
    dense = {}
    for name, tensor in tensors.items():
        base = name.removesuffix(".weight_packed").removesuffix(".weight")
        if name.endswith("_scale"):
            continue
        if tensor.dtype == torch.uint8:
            dense[base + ".weight"] = _mxfp4_values(tensor, tensors[base + ".weight_scale"])
        elif name.endswith(".weight_packed"):
            codes = torch.stack([(tensor >> shift) & 15 for shift in range(0, 32, 4)], dim=-1).flatten(-2) - 8
            scales = tensors[base + ".weight_scale"].float().repeat_interleave(INT4_GROUP_SIZE, dim=1)
            dense[base + ".weight"] = codes * scales
        elif name + "_scale" in tensors and tensors[name + "_scale"].numel() in (1, len(tensor)):
            dense[name] = tensor.float() * tensors[name + "_scale"].reshape(-1, 1)
        elif name + "_scale_inv" in tensors or name + "_scale" in tensors:
            blocks = tensors.get(name + "_scale_inv", tensors.get(name + "_scale"))
            assert blocks is not None
            scales = blocks.repeat_interleave(FP8_BLOCK_SIZE, 0)
            scales = scales.repeat_interleave(FP8_BLOCK_SIZE, 1)[: tensor.shape[0], : tensor.shape[1]]
            dense[name] = tensor.float() * scales
        elif not name.endswith(("_shape", "_scale_inv")):
            dense[name] = tensor
    return dense


def _mxfp4_values(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    magnitudes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    columns = torch.stack([codes & 15, codes >> 4], dim=-1).flatten(-2)
    values = magnitudes[(columns & 7).int()] * (1 - 2 * (columns >> 3).float())
    return values * torch.exp2(scales.view(torch.uint8).float() - 127).repeat_interleave(32, dim=1)


def _mlp(random: _Random, prefix: str, hidden: int, intermediate: int) -> Tensors:
    return {
        prefix + "gate_proj.weight": random.matrix(intermediate, hidden),
        prefix + "up_proj.weight": random.matrix(intermediate, hidden),
        prefix + "down_proj.weight": random.matrix(hidden, intermediate),
    }


def _moe(random: _Random, prefix: str, config: KimiModelConfig) -> Tensors:
    tensors = {
        prefix + "gate.weight": random.matrix(config.n_routed_experts, config.hidden_size),
        prefix + "gate.e_score_correction_bias": 0.1 * random.normal(config.n_routed_experts),
    }
    for expert in range(config.n_routed_experts):
        tensors |= _mlp(random, f"{prefix}experts.{expert}.", config.hidden_size, config.moe_intermediate_size)
    if config.n_shared_experts:
        width = config.n_shared_experts * config.moe_intermediate_size
        tensors |= _mlp(random, prefix + "shared_experts.", config.hidden_size, width)
    return tensors


def _mla(random: _Random, prefix: str, dims: MlaDims, hidden: int, input_size: int) -> Tensors:
    heads = dims.num_attention_heads
    tensors = {
        prefix + "kv_a_proj_with_mqa.weight": random.matrix(dims.latent_dim, input_size),
        prefix + "kv_a_layernorm.weight": random.norm(dims.kv_lora_rank),
        prefix + "kv_b_proj.weight": random.matrix(
            heads * (dims.qk_nope_head_dim + dims.v_head_dim), dims.kv_lora_rank
        ),
        prefix + "o_proj.weight": random.matrix(hidden, heads * dims.v_head_dim),
    }
    if dims.q_lora_rank is None:
        return tensors | {prefix + "q_proj.weight": random.matrix(heads * dims.qk_head_dim, input_size)}
    return tensors | {
        prefix + "q_a_proj.weight": random.matrix(dims.q_lora_rank, input_size),
        prefix + "q_a_layernorm.weight": random.norm(dims.q_lora_rank),
        prefix + "q_b_proj.weight": random.matrix(heads * dims.qk_head_dim, dims.q_lora_rank),
    }


def _mha(random: _Random, prefix: str, config: Eagle3MhaDraftConfig, input_size: int) -> Tensors:
    q_width = config.num_attention_heads * config.head_dim
    kv_width = config.num_key_value_heads * config.head_dim
    return {
        prefix + "q_proj.weight": random.matrix(q_width, input_size),
        prefix + "k_proj.weight": random.matrix(kv_width, input_size),
        prefix + "v_proj.weight": random.matrix(kv_width, input_size),
        prefix + "o_proj.weight": random.matrix(config.hidden_size, q_width),
    }


def _quantize(tensors: Tensors, config: KimiModelConfig) -> Tensors:
    quantized: Tensors = {}
    for name, tensor in tensors.items():
        module = name.removesuffix(".weight")
        is_linear = module.endswith("_proj") or module.endswith("kv_a_proj_with_mqa")
        stored = config.quantization.stored(module)
        if not is_linear or stored.method is QuantizationMethod.NONE:
            quantized[name] = tensor
        elif stored.method is QuantizationMethod.INT4:
            quantized |= _int4(module, tensor)
        elif stored.method is QuantizationMethod.MXFP4:
            weight = quantize_mxfp4(tensor)
            quantized |= {f"{module}.{stored.values}": weight.codes, f"{module}.{stored.scales}": weight.scales}
        elif stored.block_size:
            quantized |= _fp8(name, tensor, f"{module}.{stored.scales}")
        else:
            quantized |= fp8_with_scales(name, tensor, tensor.abs().amax(dim=1, keepdim=True))
    return quantized


def _int4(module: str, weight: torch.Tensor) -> Tensors:
    groups = weight.unflatten(1, (-1, INT4_GROUP_SIZE))
    scales = (groups.abs().amax(dim=2) / 7).bfloat16()
    codes = (groups / scales.float()[..., None]).round().clamp(-8, 7).flatten(1).to(torch.int64) + 8
    words = (codes.unflatten(1, (-1, 8)) << torch.arange(0, 32, 4)).sum(dim=2)
    packed = torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)
    return {
        module + ".weight_packed": packed,
        module + ".weight_scale": scales,
        module + ".weight_shape": torch.tensor(weight.shape, dtype=torch.int32),
    }


def _fp8(name: str, weight: torch.Tensor, scales_name: str) -> Tensors:
    block = FP8_BLOCK_SIZE
    rows, columns = weight.shape
    padded = torch.nn.functional.pad(weight, (0, -columns % block, 0, -rows % block))
    blocks = padded.unflatten(0, (-1, block)).unflatten(2, (-1, block))
    scales = blocks.abs().amax(dim=(1, 3)) / FP8_MAX
    values = (blocks / scales[:, None, :, None]).flatten(2, 3).flatten(0, 1)[:rows, :columns]
    return {name: values.to(torch.float8_e4m3fn), scales_name: scales}
