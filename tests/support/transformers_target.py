"""The target and chat templates as the `transformers` library computes them, which shares nothing with ours.

It is imported by those who need it: it costs four seconds, and each process that collects tests would pay them.
"""

from typing import TYPE_CHECKING, Any

import torch

from kimi_backend.config.model_config import KimiModelConfig
from support.tiny_checkpoints import Tensors

if TYPE_CHECKING:
    from transformers import DeepseekV3ForCausalLM


def transformers_model(json: dict[str, Any], tensors: Tensors) -> "DeepseekV3ForCausalLM":
    """The library's model with the checkpoint's weights, its experts stacked as it wants them."""
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


def render_with_transformers(messages: list[dict[str, Any]], chat_template: str, **kwargs: Any) -> str:
    """One conversation's prompt."""
    from transformers.utils.chat_template_utils import render_jinja_template

    rendered, _ = render_jinja_template([messages], chat_template=chat_template, add_generation_prompt=True, **kwargs)
    text: str = rendered[0]
    return text
