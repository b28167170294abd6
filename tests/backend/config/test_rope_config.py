"""Rotary embeddings as files spell them, and the factors that follow from their numbers."""

import math
from typing import Any

import pytest

from kimi_backend.config.json_fields import JsonFields
from kimi_backend.config.rope_config import RopeConfig, RopeType, yarn_mscale
from kimi_backend.errors import ConfigError

YARN = {"type": "yarn", "factor": 32, "original_max_position_embeddings": 4096}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8,
    "original_max_position_embeddings": 8192,
    "low_freq_factor": 1,
    "high_freq_factor": 4,
}


def read(**fields: Any) -> RopeConfig:
    return RopeConfig.from_fields(JsonFields(fields, "config.json"), interleaved=True)


@pytest.mark.parametrize(
    ("scaling", "expected"),
    [
        (None, {}),
        ({"rope_type": "default"}, {}),
        ({"mrope_section": [1, 2]}, {}),
        ({"type": "mrope", "mrope_section": [1, 2]}, {}),
        ({"type": "linear", "factor": 1}, {"type": RopeType.LINEAR, "factor": 1.0}),
        ({"rope_type": "linear", "type": "linear", "factor": 2.5}, {"type": RopeType.LINEAR, "factor": 2.5}),
        (
            LLAMA3,
            {
                "type": RopeType.LLAMA3,
                "factor": 8.0,
                "original_max_position_embeddings": 8192,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
            },
        ),
        (YARN, {"type": RopeType.YARN, "factor": 32.0, "original_max_position_embeddings": 4096}),
        (
            {**YARN, "type": "deepseek_yarn", "beta_fast": 8, "beta_slow": 8, "mscale": 0.5, "mscale_all_dim": 0.25},
            {
                "type": RopeType.YARN,
                "factor": 32.0,
                "original_max_position_embeddings": 4096,
                "beta_fast": 8.0,
                "beta_slow": 8.0,
                "mscale": 0.5,
                "mscale_all_dim": 0.25,
            },
        ),
        (
            {**YARN, "attention_factor": 1.5, "truncate": True},
            {
                "type": RopeType.YARN,
                "factor": 32.0,
                "original_max_position_embeddings": 4096,
                "attention_factor": 1.5,
            },
        ),
    ],
)
def test_every_type_is_read(scaling: Any, expected: dict[str, Any]) -> None:
    assert read(rope_theta=50_000, rope_scaling=scaling) == RopeConfig(theta=50_000.0, interleaved=True, **expected)


def test_a_theta_inside_is_taken_and_another_one_outside_told() -> None:
    for outside, num_warnings in {None: 0, 7.0: 0, 9.0: 1}.items():
        fields = JsonFields({"rope_theta": outside, "rope_parameters": {"rope_theta": 7.0}}, "config.json")
        assert RopeConfig.from_fields(fields, interleaved=False) == RopeConfig(theta=7.0, interleaved=False)
        assert len(fields.warnings) == num_warnings
    assert not read(rope_interleave=False).interleaved
    assert read(rope_interleave=True).interleaved


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        ({**LLAMA3, "low_freq_factor": 4}, r"low_freq_factor is 4, expected less than high_freq_factor \(4\)"),
        ({"type": "linear", "factor": 0.5}, "factor is 0.5, expected a finite number of at least 1"),
        ({**YARN, "attention_factor": 0}, "attention_factor is 0"),
        ({"rope_theta": 1.0}, "rope_theta is 1.0, expected a finite number above 1"),
    ],
)
def test_what_cannot_be_is_named(scaling: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read(rope_scaling=scaling)


def test_yarns_factors() -> None:
    assert (yarn_mscale(1.0, 2.0), yarn_mscale(math.e, 2.0)) == (1.0, pytest.approx(1.2))
    plain = RopeConfig(theta=1e4, interleaved=True, type=RopeType.LINEAR, factor=math.e)
    assert (plain.is_yarn, plain.cos_sin_scale, plain.softmax_mscale) == (False, 1.0, 1.0)

    def yarn(**fields: float) -> tuple[float, float]:
        made = RopeConfig(theta=1e4, interleaved=True, type=RopeType.YARN, factor=math.e, **fields)
        assert made.is_yarn
        return round(made.cos_sin_scale, 6), round(made.softmax_mscale, 6)

    assert yarn(mscale=2.0, mscale_all_dim=1.0) == (round(1.2 / 1.1, 6), 1.1)
    assert yarn(mscale=2.0, mscale_all_dim=0.0) == (1.1, 1.0)
    assert yarn(mscale=0.0, mscale_all_dim=1.0) == (1.1, 1.1)
    assert yarn(mscale=2.0, mscale_all_dim=1.0, attention_factor=3.0) == (3.0, 1.1)
