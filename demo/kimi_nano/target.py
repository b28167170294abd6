"""The target for training: `kimi_backend.models.kimi_k25` in differentiable torch, parameters by checkpoint name."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from kimi_backend.config.model_config import KimiModelConfig
from kimi_backend.layers.rotary import cos_sin_table
from kimi_nano.formulas import (
    all_experts,
    causal_attention,
    chosen_experts,
    fake_int4,
    linear,
    mla_queries_keys_values,
    rms_norm,
    route,
    swiglu,
)

Weights = dict[str, Tensor]
Functions = tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]
MLA_NAMES = ("q_a_proj", "q_a_layernorm", "q_b_proj", "kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj")


@dataclass(frozen=True, slots=True)
class TargetOutput:
    """The output of a forward pass."""

    normed: Tensor
    """[T, H] float32, for the head."""
    aux: Tensor | None
    """[T, C * H] float32: the R(j) asked for, side by side."""
    loads: Tensor
    """[layers with experts, E], tokens that chose each expert."""


def matrix(rows: int, columns: int, scale: float = 1.0) -> nn.Parameter:
    return nn.Parameter(torch.randn(rows, columns) * scale * columns**-0.5)


def attention_shapes(config: Any, input_size: int, output_size: int) -> dict[str, tuple[int, ...]]:
    """Shapes of an MLA layer's tensors, by the last part of their names."""
    g, heads = config, config.num_attention_heads
    return {
        "q_a_proj": (g.q_lora_rank, input_size),
        "q_a_layernorm": (g.q_lora_rank,),
        "q_b_proj": (heads * g.qk_head_dim, g.q_lora_rank),
        "kv_a_proj_with_mqa": (g.latent_dim, input_size),
        "kv_a_layernorm": (g.kv_lora_rank,),
        "kv_b_proj": (heads * (g.qk_nope_head_dim + g.v_head_dim), g.kv_lora_rank),
        "o_proj": (output_size, heads * g.v_head_dim),
    }


class NanoTarget(nn.Module):
    """A module whose parameters carry the checkpoint's names with "/" for "."; experts are stacked by layer.

    The three functions that a layer is made of take plain tensors, so that each is compiled once for all layers.
    """

    bias: Tensor
    cos_sin: Tensor

    def __init__(self, config: KimiModelConfig) -> None:
        super().__init__()
        self.config = config
        self.weights = nn.ParameterDict()
        self.quantizes = False
        """Experts pass through int4 in the forward pass."""
        g = config
        self._add("model.embed_tokens.weight", nn.Parameter(torch.randn(g.vocab_size, g.hidden_size) * 0.1))
        for layer in range(g.num_hidden_layers):
            self._add_layer(layer)
        self._add("model.norm.weight", nn.Parameter(torch.ones(g.hidden_size)))
        self._add("lm_head.weight", matrix(g.vocab_size, g.hidden_size, 0.5))
        num_moe = g.num_moe_layers
        self.register_buffer("bias", torch.zeros(num_moe, g.n_routed_experts))
        table = cos_sin_table(g.qk_rope_head_dim, g.max_position_embeddings, g.rope, torch.device("cpu"))
        self.register_buffer("cos_sin", table, persistent=False)
        self.is_compiled = False
        self._functions: Functions = EAGER

    def compile_layers(self) -> None:
        """Compile what a layer is made of; `eager_layers` undoes it."""
        self.is_compiled = True
        attend, dense, moe = map(torch.compile, self._functions)
        self._functions = (attend, dense, moe)

    def eager_layers(self) -> None:
        self.is_compiled = False
        self._functions = EAGER

    def eager(self, token_ids: Tensor, dtype: torch.dtype, aux_layer_ids: tuple[int, ...] = ()) -> TargetOutput:
        """Run `forward` for shapes that nothing was compiled for."""
        compiled, self._functions = self._functions, EAGER
        try:
            return self.forward(token_ids, dtype, aux_layer_ids)
        finally:
            self._functions = compiled

    def forward(self, token_ids: Tensor, dtype: torch.dtype, aux_layer_ids: tuple[int, ...] = ()) -> TargetOutput:
        """token_ids: [B, L] int64, whole sequences from position 0."""
        g, length = self.config, token_ids.shape[1]
        residual = self.weight("model.embed_tokens.weight")[token_ids.flatten()]
        cos_sin = self.cos_sin[:length].repeat(token_ids.shape[0], 1)
        captured: dict[int, Tensor] = {}
        loads: list[Tensor] = []
        for layer in range(g.num_hidden_layers):
            captured[layer] = residual
            q, k, v = self._functions[0](residual, self.attention_weights(layer), cos_sin, g, dtype)
            heads = causal_attention(q, k, v, g.softmax_scale, length)
            residual, load = self.finish_layer(layer, residual, heads, dtype)
            loads += [load] if load is not None else []
        captured[g.num_hidden_layers] = residual
        aux = torch.cat([captured[j] for j in aux_layer_ids], dim=1) if aux_layer_ids else None
        return TargetOutput(self.norm(residual), aux, torch.stack(loads))

    def layer_inputs(
        self, layer: int, residual: Tensor, cos_sin: Tensor, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v of one layer."""
        result: tuple[Tensor, Tensor, Tensor] = _attention_inputs(
            residual, self.attention_weights(layer), cos_sin, self.config, dtype
        )
        return result

    def finish_layer(
        self, layer: int, residual: Tensor, heads: Tensor, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor | None]:
        """The residual stream leaving the layer, and the load of its experts."""
        weights = self.mlp_weights(layer)
        if not self.config.is_moe_layer(layer):
            return self._functions[1](residual, heads, weights, self.config, dtype), None
        place = layer - self.config.first_k_dense_replace
        left, load = self._functions[2](residual, heads, weights, self.bias[place], self.config, dtype)
        return left, load

    def finish_layer_eager(
        self, layer: int, residual: Tensor, heads: Tensor, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor | None]:
        """Run `finish_layer` for shapes that nothing was compiled for."""
        compiled, self._functions = self._functions, EAGER
        try:
            return self.finish_layer(layer, residual, heads, dtype)
        finally:
            self._functions = compiled

    @property
    def device(self) -> torch.device:
        return self.cos_sin.device

    def norm(self, residual: Tensor) -> Tensor:
        return rms_norm(residual, self.weight("model.norm.weight"), self.config.rms_norm_eps)

    def logits(self, normed: Tensor, dtype: torch.dtype) -> Tensor:
        """[T, vocab_size] in the compute dtype."""
        return linear(normed, self.weight("lm_head.weight"), dtype)

    def weight(self, name: str) -> Tensor:
        weight: Tensor = self.weights[name.replace(".", "/")]
        return weight

    def attention_weights(self, layer: int) -> Weights:
        prefix = f"model.layers.{layer}"
        return {name: self.weight(f"{prefix}.self_attn.{name}.weight") for name in MLA_NAMES} | {
            "input_layernorm": self.weight(f"{prefix}.input_layernorm.weight")
        }

    def mlp_weights(self, layer: int) -> Weights:
        prefix = f"model.layers.{layer}"
        names = {"o_proj": "self_attn.o_proj", "post_attention_layernorm": "post_attention_layernorm"}
        if not self.config.is_moe_layer(layer):
            names |= {name: f"mlp.{name}" for name in ("gate_proj", "up_proj", "down_proj")}
            return {name: self.weight(f"{prefix}.{full}.weight") for name, full in names.items()}
        names |= {name: f"mlp.shared_experts.{name}" for name in ("gate_proj", "up_proj", "down_proj")}
        names["gate"] = "mlp.gate"
        weights = {name: self.weight(f"{prefix}.{full}.weight") for name, full in names.items()}
        for name in ("experts_gate_up", "experts_down"):
            stacked = self.weight(f"{prefix}.mlp.{name}")
            # A view, so that compiled code meets a plain tensor either way.
            weights[name] = fake_int4(stacked) if self.quantizes else stacked.view_as(stacked)
        return weights

    def _add(self, name: str, parameter: nn.Parameter) -> None:
        self.weights[name.replace(".", "/")] = parameter

    def _add_layer(self, layer: int) -> None:
        g, prefix = self.config, f"model.layers.{layer}"
        towards_residual = (2 * g.num_hidden_layers) ** -0.5
        for norm in ("input_layernorm", "post_attention_layernorm"):
            self._add(f"{prefix}.{norm}.weight", nn.Parameter(torch.ones(g.hidden_size)))
        for name, shape in attention_shapes(g, g.hidden_size, g.hidden_size).items():
            scale = towards_residual if name == "o_proj" else 1.0
            parameter = matrix(*shape, scale) if len(shape) == 2 else nn.Parameter(torch.ones(shape))
            self._add(f"{prefix}.self_attn.{name}.weight", parameter)
        mlp, width = f"{prefix}.mlp", g.intermediate_size
        if g.is_moe_layer(layer):
            experts, inner = g.n_routed_experts, g.moe_intermediate_size
            self._add(f"{mlp}.gate.weight", matrix(experts, g.hidden_size))
            gate_up = torch.randn(experts, 2 * inner, g.hidden_size) * g.hidden_size**-0.5
            down = torch.randn(experts, g.hidden_size, inner) * inner**-0.5 * towards_residual
            self._add(f"{mlp}.experts_gate_up", nn.Parameter(gate_up))
            self._add(f"{mlp}.experts_down", nn.Parameter(down))
            mlp, width = f"{mlp}.shared_experts", g.n_shared_experts * inner
        self._add(f"{mlp}.gate_proj.weight", matrix(width, g.hidden_size))
        self._add(f"{mlp}.up_proj.weight", matrix(width, g.hidden_size))
        self._add(f"{mlp}.down_proj.weight", matrix(g.hidden_size, width, towards_residual))


def _attention_inputs(
    residual: Tensor, weights: Weights, cos_sin: Tensor, config: KimiModelConfig, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    x = rms_norm(residual, weights["input_layernorm"], config.rms_norm_eps)
    return mla_queries_keys_values(x, weights, cos_sin, config, config.rms_norm_eps, dtype)


def _dense_tail(
    residual: Tensor, heads: Tensor, weights: Weights, config: KimiModelConfig, dtype: torch.dtype
) -> Tensor:
    residual = residual + linear(heads, weights["o_proj"], dtype)
    x = rms_norm(residual, weights["post_attention_layernorm"], config.rms_norm_eps)
    return residual + swiglu(x, weights["gate_proj"], weights["up_proj"], weights["down_proj"], dtype)


def _moe_tail(
    residual: Tensor, heads: Tensor, weights: Weights, bias: Tensor, config: KimiModelConfig, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    g = config
    residual = residual + linear(heads, weights["o_proj"], dtype)
    x = rms_norm(residual, weights["post_attention_layernorm"], g.rms_norm_eps)
    scores, load = route(x, weights["gate"], bias, g.num_experts_per_tok, g.norm_topk_prob, g.routed_scaling_factor)
    is_plain = x.device.type == "cpu" and not torch.is_grad_enabled()
    experts = chosen_experts if is_plain else all_experts
    routed = experts(x, scores, weights["experts_gate_up"], weights["experts_down"], dtype)
    shared = swiglu(x, weights["gate_proj"], weights["up_proj"], weights["down_proj"], dtype)
    return residual + routed + shared, load


EAGER: Functions = (_attention_inputs, _dense_tail, _moe_tail)
