"""The target as the `transformers` library computes it, which shares nothing with ours."""

from typing import TYPE_CHECKING, Any

import torch

from kimi_backend.config.model_config import KimiModelConfig
from support.tiny_checkpoints import Tensors

if TYPE_CHECKING:
    from transformers import DeepseekV3ForCausalLM


def transformers_model(json: dict[str, Any], tensors: Tensors) -> "DeepseekV3ForCausalLM":
    """The library's model with the checkpoint's weights, its experts stacked as it wants them."""
    # Four seconds, for those who need it and not for every process that collects tests.
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    config = KimiModelConfig.from_hf_json(json)
    state = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    for layer in range(config.num_hidden_layers):
        if config.is_moe_layer(layer):
            prefix = f"model.layers.{layer}.mlp.experts."
            experts = range(config.n_routed_experts)
            gate, up, down = (
                torch.stack([tensors[f"{prefix}{expert}.{name}_proj.weight"] for expert in experts])
                for name in ("gate", "up", "down")
            )
            state[prefix + "gate_up_proj"] = torch.cat([gate, up], dim=1)
            state[prefix + "down_proj"] = down
    library_config = DeepseekV3Config(**{k: v for k, v in json.items() if k != "quantization_config"})
    library_config._attn_implementation = "eager"
    library_config._experts_implementation = "eager"
    model = DeepseekV3ForCausalLM(library_config).eval()
    model.load_state_dict(state, strict=True)
    return model
