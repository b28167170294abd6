"""Rotary position embedding settings, in the `rope_scaling` and the `rope_parameters` (transformers 5) spelling."""

import math
from dataclasses import dataclass
from enum import Enum

from kimi_backend.config.json_fields import JsonFields

DEFAULT_THETA = 10000.0
DEFAULT_BETA_FAST = 32.0
DEFAULT_BETA_SLOW = 1.0
DEFAULT_MSCALE = 1.0
DEFAULT_MSCALE_ALL_DIM = 0.0


class RopeType(str, Enum):
    """The ways to stretch frequencies beyond the trained length; values are those of the files."""

    DEFAULT = "default"
    """They are not."""
    LINEAR = "linear"
    """All are slowed by `factor`."""
    LLAMA3 = "llama3"
    """Those that turn seldom over the original length are slowed by `factor`, those between are blended."""
    YARN = "yarn"
    """Peng et al. 2023, arXiv 2309.00071."""


_SPELLINGS = {
    **{choice.value: choice for choice in RopeType},
    "deepseek_yarn": RopeType.YARN,
    "mrope": RopeType.DEFAULT,
}
"""`mrope` turns by three positions, of time, height and width, which are equal in text."""


def yarn_mscale(factor: float, mscale: float) -> float:
    """Yarn's temperature, 0.1 * mscale * ln(factor) + 1 (Peng et al. 2023, section 3.4)."""
    return 1.0 if factor <= 1.0 else 0.1 * mscale * math.log(factor) + 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """The frequencies of the rotation and how pairs lie. A field that the type does not use keeps its default."""

    type: RopeType = RopeType.DEFAULT
    theta: float
    interleaved: bool
    """Pairs are (2i, 2i + 1) if true (DeepSeek), (i, i + half) if false (Llama)."""
    factor: float = 1.0
    original_max_position_embeddings: int = 1
    """Length before the extension: llama3 and yarn."""
    low_freq_factor: float = 1.0
    """llama3: pairs that turn less than so many times over the original length are slowed."""
    high_freq_factor: float = 4.0
    """llama3: pairs that turn more than so many times keep their frequency."""
    beta_fast: float = DEFAULT_BETA_FAST
    beta_slow: float = DEFAULT_BETA_SLOW
    mscale: float = DEFAULT_MSCALE
    mscale_all_dim: float = DEFAULT_MSCALE_ALL_DIM
    attention_factor: float | None = None
    """Yarn: overrides the multiplier of cosines and sines."""

    @classmethod
    def from_fields(cls, fields: JsonFields, *, interleaved: bool) -> "RopeConfig":
        """Read a model's config.

        Args:
            interleaved: the pairing of models that do not say it in `rope_interleave`.
        Raises:
            ConfigError: the rope type is not one of `RopeType`, or a number is missing or out of range.
        """
        scaling = fields.object("rope_parameters") or fields.object("rope_scaling")
        theta = fields.number("rope_theta", DEFAULT_THETA, above=1.0)
        if scaling is not None and scaling.has("rope_theta"):
            inner = scaling.number("rope_theta", above=1.0)
            if fields.has("rope_theta") and inner != theta:
                fields.warn(f"rope_theta is {theta:g} here and {inner:g} in {scaling.path}, which is taken")
            theta = inner
        interleaved = fields.boolean("rope_interleave", interleaved)
        if scaling is None:
            return cls(theta=theta, interleaved=interleaved)
        rope_type = _read_type(scaling)
        if rope_type is RopeType.DEFAULT:
            return cls(theta=theta, interleaved=interleaved)
        factor = scaling.number("factor", above=1.0, or_equal=True)
        if rope_type is RopeType.LINEAR:
            return cls(type=rope_type, theta=theta, interleaved=interleaved, factor=factor)
        original = scaling.integer("original_max_position_embeddings")
        if rope_type is RopeType.LLAMA3:
            low, high = scaling.number("low_freq_factor"), scaling.number("high_freq_factor")
            if low >= high:
                raise scaling.error("low_freq_factor", f"less than high_freq_factor ({high:g})")
            return cls(
                type=rope_type,
                theta=theta,
                interleaved=interleaved,
                factor=factor,
                original_max_position_embeddings=original,
                low_freq_factor=low,
                high_freq_factor=high,
            )
        scaling.require("truncate", True)
        beta_fast = scaling.number("beta_fast", DEFAULT_BETA_FAST)
        beta_slow = scaling.number("beta_slow", DEFAULT_BETA_SLOW)
        if beta_slow > beta_fast:
            raise scaling.error("beta_slow", f"at most beta_fast ({beta_fast:g})")
        return cls(
            type=rope_type,
            theta=theta,
            interleaved=interleaved,
            factor=factor,
            original_max_position_embeddings=original,
            beta_fast=beta_fast,
            beta_slow=beta_slow,
            mscale=scaling.number("mscale", DEFAULT_MSCALE, or_equal=True),
            mscale_all_dim=scaling.number("mscale_all_dim", DEFAULT_MSCALE_ALL_DIM, or_equal=True),
            attention_factor=scaling.number("attention_factor") if scaling.has("attention_factor") else None,
        )

    @property
    def is_yarn(self) -> bool:
        return self.type is RopeType.YARN

    @property
    def cos_sin_scale(self) -> float:
        """The factor by which cosines and sines are multiplied."""
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


def _read_type(scaling: JsonFields) -> RopeType:
    """`rope_type`, once called `type`; where neither stands, a theta or mrope sections beside it mean the default."""
    if scaling.has("rope_type") and scaling.has("type"):
        scaling.value("type")  # transformers writes both
    implied = "default" if scaling.has("rope_theta") or scaling.has("mrope_section") else None
    return _SPELLINGS[scaling.choice("rope_type" if scaling.has("rope_type") else "type", tuple(_SPELLINGS), implied)]
