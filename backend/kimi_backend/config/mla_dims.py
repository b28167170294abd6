"""The geometry of multi-head latent attention, shared by the target and the MLA draft."""

from dataclasses import dataclass

from kimi_backend.config.json_fields import JsonFields
from kimi_backend.config.rope_config import RopeConfig
from kimi_backend.errors import ConfigError

KV_CACHE_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1}
"""Bytes of a cached value for each `kv_cache_dtype`, named as torch names them."""


def kv_item_bytes(kv_cache_dtype: str) -> int:
    """Bytes of one cached value.

    Raises:
        ConfigError: unknown dtype.
    """
    try:
        return KV_CACHE_ITEM_BYTES[kv_cache_dtype]
    except KeyError:
        allowed = ", ".join(KV_CACHE_ITEM_BYTES)
        raise ConfigError(f"kv_cache_dtype is {kv_cache_dtype!r}, expected one of {allowed}") from None


# Without slots of its own, so that a config with slots may inherit these fields beside another base.
@dataclass(frozen=True, kw_only=True)
class MlaDims:
    """The dimensions that an MLA layer needs of its model (DeepSeek-V2, section 2.1); `KimiModelConfig` and
    `Eagle3MlaDraftConfig` are two."""

    __slots__ = ()

    num_attention_heads: int
    q_lora_rank: int | None
    """None: a single `q_proj` instead of `q_a_proj`, `q_a_layernorm`, `q_b_proj`."""
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    rope: RopeConfig

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def latent_dim(self) -> int:
        """Width of a cached row: compressed KV, then the shared rotated key."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def softmax_scale(self) -> float:
        """qk_head_dim^-1/2, times yarn's m^2."""
        return float(self.qk_head_dim**-0.5 * self.rope.softmax_mscale**2)


def read_q_lora_rank(fields: JsonFields) -> int | None:
    """`q_lora_rank`, which must be there: null says that queries are not compressed."""
    if "q_lora_rank" not in fields.data:
        raise fields.error("q_lora_rank", "a positive integer, or null for uncompressed queries")
    return fields.optional_integer("q_lora_rank")


def read_rope_head_dim(fields: JsonFields, field: str = "qk_rope_head_dim") -> int:
    """The rotated width of a head: even, since rope turns pairs."""
    value = fields.integer(field)
    if value % 2:
        raise fields.error(field, "an even integer")
    return value
