"""Makes a deeper target of a trained one, so that its training is not begun anew.

A layer of the new target is a copy of the layer at the same share of the depth. The first copy of a layer does what the
layer did; what later copies add to the residual stream is set to zero, so that they begin by doing nothing and learn
from there (block expansion: Wu et al. 2024, arXiv 2401.02415). Where the new target has fewer experts, it takes the
first ones: their load is balanced, so none is worth more than another.
"""

import torch

from kimi_nano.target import NanoTarget

WRITES_TO_RESIDUAL = ("o_proj.weight", "down_proj.weight", "experts_down")


@torch.no_grad()
def grow(target: NanoTarget, trained: NanoTarget) -> None:
    """Set the weights of `target` from a trained one of the same widths that is at most as deep.

    Raises:
        ValueError: the trained target is deeper, or has fewer experts.
    """
    sources = source_layers(target, trained)
    if trained.config.n_routed_experts < target.config.n_routed_experts:
        raise ValueError(
            f"{trained.config.n_routed_experts} experts given, {target.config.n_routed_experts} are needed"
        )
    for key, parameter in target.weights.items():
        name = key.replace("/", ".")
        if not name.startswith("model.layers."):
            parameter.copy_(trained.weight(name))
            continue
        layer, rest = name.removeprefix("model.layers.").split(".", 1)
        source = sources[int(layer)]
        parameter.copy_(trained.weight(f"model.layers.{source}.{rest}")[: parameter.shape[0]])
        if sources.index(source) != int(layer) and rest.endswith(WRITES_TO_RESIDUAL):
            parameter.zero_()
    first = target.config.first_k_dense_replace
    biases = trained.bias[[source - first for source in sources[first:]]]
    target.bias.copy_(biases[:, : target.bias.shape[1]])


def source_layers(target: NanoTarget, trained: NanoTarget) -> list[int]:
    """The trained layer that each layer of the target is a copy of: dense ones of dense ones, the others evenly spread.

    Raises:
        ValueError: the trained target is deeper, or has other dense layers.
    """
    dense = target.config.first_k_dense_replace
    if trained.config.first_k_dense_replace != dense:
        raise ValueError(f"{trained.config.first_k_dense_replace} dense layers given, {dense} are needed")
    given, wanted = trained.config.num_moe_layers, target.config.num_moe_layers
    if given > wanted:
        raise ValueError(f"{given} layers with experts given, at most {wanted} are needed")
    return [*range(dense), *(dense + place * given // wanted for place in range(wanted))]
