import math
from typing import Any

import pytest
import torch

from kimi_backend.config.json_fields import JsonFields
from kimi_backend.config.rope_config import RopeConfig, RopeType
from kimi_backend.layers.rotary import cos_sin_table, inverse_frequencies

CPU = torch.device("cpu")
KIMI = RopeConfig(
    type=RopeType.YARN,
    theta=50000.0,
    interleaved=True,
    factor=64.0,
    original_max_position_embeddings=4096,
    beta_fast=32.0,
    beta_slow=1.0,
    mscale=1.0,
    mscale_all_dim=1.0,
)
PLAIN = RopeConfig(theta=50000.0, interleaved=True)


@pytest.mark.parametrize(
    ("theta", "beta_fast", "ramp"),
    [(50000.0, 32.0, (8, 20)), (50000.0, 1.0, (19, 20)), (10000.0, 32.0, (10, 23)), (10000.0, 1.0, (22, 23))],
)
def test_the_ramp_of_kimis_settings(theta: float, beta_fast: float, ramp: tuple[int, int]) -> None:
    """Pairs below the ramp keep their frequency, pairs from its end on are slowed 64-fold."""
    rope = RopeConfig(
        type=RopeType.YARN,
        theta=theta,
        interleaved=True,
        factor=64.0,
        original_max_position_embeddings=4096,
        beta_fast=beta_fast,
    )
    plain = inverse_frequencies(64, RopeConfig(theta=theta, interleaved=True))
    slowing = plain / inverse_frequencies(64, rope)
    low, high = ramp
    torch.testing.assert_close(slowing[: low + 1], torch.ones(low + 1, dtype=torch.float64))
    torch.testing.assert_close(slowing[high:], torch.full((32 - high,), 64.0, dtype=torch.float64))
    assert ((slowing[low + 1 : high] > 1) & (slowing[low + 1 : high] < 64)).all()


@pytest.mark.parametrize(
    "scaling",
    [
        {"factor": 64.0, "mscale": 1.0, "mscale_all_dim": 1.0},
        {"factor": 32.0, "beta_fast": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0},
        {"factor": 4.0, "mscale": 0.707, "mscale_all_dim": 1.0},
        {"factor": 4.0},
        {"factor": 1.0},
    ],
)
def test_frequencies_and_magnitude_equal_the_transformers_librarys(scaling: dict[str, float]) -> None:
    from transformers import DeepseekV3Config
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling = {"original_max_position_embeddings": 4096, "rope_theta": 50000.0, **scaling}
    config = DeepseekV3Config(qk_rope_head_dim=64, rope_parameters={"rope_type": "yarn", **scaling})
    expected, magnitude = ROPE_INIT_FUNCTIONS["yarn"](config)
    fields = {name: value for name, value in scaling.items() if name != "rope_theta"}
    rope = RopeConfig(type=RopeType.YARN, theta=50000.0, interleaved=True, **fields)  # type: ignore[arg-type]
    torch.testing.assert_close(inverse_frequencies(64, rope).float(), expected, rtol=1e-5, atol=0)
    first = cos_sin_table(64, 1, rope, CPU)[0, 0]
    assert float(first) == pytest.approx(magnitude, rel=1e-6)


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "linear", "factor": 4.0},
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 2.0, "high_freq_factor": 16.0},
    ],
)
def test_the_frequencies_of_llama_drafts_equal_the_transformers_librarys(scaling: dict[str, Any]) -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling = {"rope_theta": 500000.0, **scaling}
    if scaling["rope_type"] == "llama3":
        scaling["original_max_position_embeddings"] = 8192
    config = LlamaConfig(head_dim=128, max_position_embeddings=131072, rope_parameters=scaling)
    expected, magnitude = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](config)
    rope = RopeConfig.from_fields(JsonFields({"rope_parameters": scaling}, "config.json"), interleaved=False)
    torch.testing.assert_close(inverse_frequencies(128, rope).float(), expected, rtol=1e-5, atol=0)
    assert (rope.cos_sin_scale, magnitude) == (1.0, 1.0)


def test_the_table_is_exact_at_the_last_position() -> None:
    """A float32 angle would be off by about 0.01 there."""
    position = 262143
    table = cos_sin_table(64, position + 1, PLAIN, CPU)
    assert table.shape == (262144, 64)
    assert table.dtype == torch.float32
    for pair in (0, 1, 5, 31):
        angle = position * 50000.0 ** (-2 * pair / 64)
        assert float(table[position, pair]) == pytest.approx(math.cos(angle), abs=1e-6)
        assert float(table[position, 32 + pair]) == pytest.approx(math.sin(angle), abs=1e-6)


def test_kimis_softmax_scale() -> None:
    assert 192**-0.5 * KIMI.softmax_mscale**2 == pytest.approx(0.144680, abs=1e-6)
    assert KIMI.cos_sin_scale == 1.0
