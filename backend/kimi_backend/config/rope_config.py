"""Rotary position embedding settings, in the `rope_scaling` and the `rope_parameters` (transformers 5) spelling."""

import math
from dataclasses import dataclass

from kimi_backend.config.json_fields import JsonFields

DEFAULT_THETA = 10000.0
DEFAULT_BETA_FAST = 32.0
DEFAULT_BETA_SLOW = 1.0
DEFAULT_MSCALE = 1.0
DEFAULT_MSCALE_ALL_DIM = 0.0


def yarn_mscale(factor: float, mscale: float) -> float:
    """Yarn's temperature, 0.1 * mscale * ln(factor) + 1 (Peng et al. 2023, section 3.4)."""
    return 1.0 if factor <= 1.0 else 0.1 * mscale * math.log(factor) + 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Plain rope, or yarn (Peng et al. 2023, arXiv 2309.00071)."""

    is_yarn: bool
    theta: float
    interleaved: bool
    """Pairs are (2i, 2i + 1) if true (DeepSeek), (i, i + half) if false (Llama)."""
    factor: float = 1.0
    original_max_position_embeddings: int = 1
    """Length before yarn's extension; meaningless without yarn, like the fields below."""
    beta_fast: float = DEFAULT_BETA_FAST
    beta_slow: float = DEFAULT_BETA_SLOW
    mscale: float = DEFAULT_MSCALE
    mscale_all_dim: float = DEFAULT_MSCALE_ALL_DIM
    attention_factor: float | None = None
    """Overrides the multiplier of cosines and sines."""

    @classmethod
    def from_fields(cls, fields: JsonFields, *, interleaved: bool) -> "RopeConfig":
        """Read a model's config.

        Args:
            interleaved: the pairing of models that do not say it in `rope_interleave`.
        Raises:
            ConfigError: the rope type is neither default nor yarn, or a number is missing or out of range.
        """
        scaling = fields.object("rope_parameters") or fields.object("rope_scaling")
        theta_fields = scaling if scaling is not None and scaling.has("rope_theta") else fields
        theta = theta_fields.number("rope_theta", DEFAULT_THETA, above=1.0)
        interleaved = fields.boolean("rope_interleave", interleaved)
        if scaling is None:
            return cls(is_yarn=False, theta=theta, interleaved=interleaved)
        type_field = "rope_type" if scaling.has("rope_type") else "type"
        rope_type = scaling.choice(type_field, ("default", "yarn"), "default" if scaling.has("rope_theta") else None)
        scaling.require("partial_rotary_factor", 1, 1.0)
        if rope_type == "default":
            return cls(is_yarn=False, theta=theta, interleaved=interleaved)
        scaling.require("truncate", True)
        beta_fast = scaling.number("beta_fast", DEFAULT_BETA_FAST)
        beta_slow = scaling.number("beta_slow", DEFAULT_BETA_SLOW)
        if beta_slow > beta_fast:
            raise scaling.error("beta_slow", f"at most beta_fast ({beta_fast:g})")
        return cls(
            is_yarn=True,
            theta=theta,
            interleaved=interleaved,
            factor=scaling.number("factor", above=1.0, or_equal=True),
            original_max_position_embeddings=scaling.integer("original_max_position_embeddings"),
            beta_fast=beta_fast,
            beta_slow=beta_slow,
            mscale=scaling.number("mscale", DEFAULT_MSCALE, or_equal=True),
            mscale_all_dim=scaling.number("mscale_all_dim", DEFAULT_MSCALE_ALL_DIM, or_equal=True),
            attention_factor=scaling.number("attention_factor") if scaling.has("attention_factor") else None,
        )

    @property
    def cos_sin_scale(self) -> float:
        """What cosines and sines are multiplied by."""
        if not self.is_yarn:
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return yarn_mscale(self.factor, self.mscale) / yarn_mscale(self.factor, self.mscale_all_dim)
        return yarn_mscale(self.factor, 1.0)

    @property
    def softmax_mscale(self) -> float:
        """m: MLA's softmax scale is qk_head_dim^-1/2 * m^2 (DeepSeek-V2's modelling code)."""
        if not self.is_yarn or not self.mscale_all_dim:
            return 1.0
        return yarn_mscale(self.factor, self.mscale_all_dim)
