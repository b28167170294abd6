"""Reference of the gated activation: float64 inside, one rounding."""

from torch import Tensor

from kimi_kernels.argument_checks import require, require_float, require_shape


def silu_mul(gate_up: Tensor) -> Tensor:
    """`signatures.SiluMul`.

    Raises:
        ValueError: gate_up is not [T, 2 * I].
    """
    require_shape("gate_up", gate_up, None, None)
    width = gate_up.shape[1]
    require(width % 2 == 0, "gate_up", f"{width} columns", "an even number")
    require_float("gate_up", gate_up)
    gate, up = gate_up.double().chunk(2, dim=-1)
    # Not torch.sigmoid: its vector and scalar paths differ in the last bit, and a row may fall to either.
    return (gate / (-gate).exp_().add_(1) * up).to(gate_up.dtype)
