"""A grown target begins as the target it was grown from, and every layer of it can learn."""

from dataclasses import replace

import pytest
import torch

from kimi_nano.grow import grow, source_layers
from kimi_nano.recipe import MICRO
from kimi_nano.target import NanoTarget


def targets(num_layers: int, **text: int) -> tuple[NanoTarget, NanoTarget]:
    """A deeper target with random weights, and one of MICRO's depth."""
    torch.manual_seed(0)
    trained = NanoTarget(replace(MICRO, num_layers=4).target_config())
    trained.bias.normal_()
    return NanoTarget(replace(MICRO, num_layers=num_layers, text=MICRO.text | text).target_config()), trained


def test_a_grown_target_computes_what_the_trained_one_does() -> None:
    target, trained = targets(9)
    grow(target, trained)
    tokens = torch.randint(0, MICRO.target_config().vocab_size, (2, 30))
    with torch.no_grad():
        torch.testing.assert_close(
            target(tokens, torch.float32).normed, trained(tokens, torch.float32).normed, atol=1e-4, rtol=1e-4
        )


def test_layers_are_copies_in_order_of_depth() -> None:
    target, trained = targets(9)
    assert source_layers(target, trained) == [0, 1, 1, 1, 2, 2, 2, 3, 3]


def test_every_weight_of_a_grown_layer_learns() -> None:
    target, trained = targets(9)
    grow(target, trained)
    optimizer = torch.optim.Adam(target.parameters(), lr=1e-2)
    tokens = torch.randint(0, MICRO.target_config().vocab_size, (2, 30))
    before = {name: parameter.detach().clone() for name, parameter in target.weights.items()}
    for _ in range(2):  # what the first step moves lets gradients through to the rest
        optimizer.zero_grad()
        target(tokens, torch.float32).normed.square().mean().backward()
        optimizer.step()
    head = {"lm_head/weight"}
    unmoved = {name for name, parameter in target.weights.items() if torch.equal(parameter, before[name])}
    assert unmoved == head


def test_fewer_experts_are_the_first_ones() -> None:
    target, trained = targets(4, n_routed_experts=3)
    grow(target, trained)
    assert torch.equal(
        target.weight("model.layers.2.mlp.gate.weight"), trained.weight("model.layers.2.mlp.gate.weight")[:3]
    )
    assert torch.equal(target.bias, trained.bias[:, :3])


@pytest.mark.parametrize(("num_layers", "experts"), [(3, 4), (9, 5)])
def test_what_cannot_be_grown_is_refused(num_layers: int, experts: int) -> None:
    target, trained = targets(num_layers, n_routed_experts=experts)
    with pytest.raises(ValueError, match="are needed"):
        grow(target, trained)
