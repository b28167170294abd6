"""How a checkpoint stores its linear layers: as they are, int4 in groups, or fp8 in blocks."""

import re
from dataclasses import dataclass
from enum import Enum

from kimi_backend.config.json_fields import JsonFields
from kimi_backend.errors import ConfigError

DEFAULT_FP8_BLOCK_SIZE = 128
TEXT_PREFIX = "language_model."


class QuantizationMethod(str, Enum):
    """Storage of the routed experts; the one difference between the families that kernels see."""

    NONE = "none"
    INT4 = "int4"
    """compressed-tensors pack-quantized, symmetric, in groups along the input (K2-Thinking, K2.5, K2.6)."""
    FP8 = "fp8"
    """float8_e4m3fn with a float32 scale for each square block (K2)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizationConfig:
    """A checkpoint's `quantization_config`."""

    method: QuantizationMethod = QuantizationMethod.NONE
    group_size: int = 0
    """int4: input columns that share a scale."""
    block_size: int = 0
    """fp8: side of the square that shares a scale."""
    ignore: tuple[str, ...] = ()
    """Modules that are not quantised: names, or regular expressions after "re:"."""

    @classmethod
    def from_fields(cls, fields: JsonFields | None) -> "QuantizationConfig":
        """Read a `quantization_config`; None means there is none.

        Raises:
            ConfigError: a method, layout or number that is not supported, by name.
        """
        if fields is None:
            return cls()
        method = fields.choice("quant_method", ("compressed-tensors", "fp8"))
        return _read_int4(fields) if method == "compressed-tensors" else _read_fp8(fields)

    def quantizes(self, module: str) -> bool:
        """Whether the linear layer of that name (without `language_model.`) is stored quantised."""
        if self.method is QuantizationMethod.NONE or module.endswith("lm_head"):
            return False
        return not any(_matches(pattern, module) for pattern in self.ignore)


def _matches(pattern: str, module: str) -> bool:
    names = (module, TEXT_PREFIX + module)
    if pattern.startswith("re:"):
        return any(re.match(pattern[3:], name) for name in names)
    # "modules_to_not_convert" of fp8 files names parents; compressed-tensors files name the module itself.
    return any(name == pattern or name.startswith(pattern + ".") for name in names)


def _read_int4(fields: JsonFields) -> QuantizationConfig:
    fields.require("format", "pack-quantized")
    fields.require("quantization_status", "compressed")
    fields.require("kv_cache_scheme")
    groups = fields.object("config_groups")
    if groups is None or len(groups.data) != 1:
        raise fields.error("config_groups", "an object with exactly one group")
    group = groups.object(next(iter(groups.data)))
    if group is None:
        raise fields.error("config_groups", "an object with exactly one group")
    if group.strings("targets") != ("Linear",):
        raise group.error("targets", "['Linear']")
    group.require("format", "pack-quantized")
    group.require("input_activations")
    group.require("output_activations")
    weights = group.object("weights")
    if weights is None:
        raise group.error("weights", "an object")
    weights.choice("type", ("int",))
    weights.integer("num_bits", minimum=4, maximum=4)
    weights.choice("strategy", ("group",))
    weights.require("symmetric", True)
    weights.require("actorder")
    weights.require("dynamic", False)
    group_size = weights.integer("group_size", minimum=8)
    if group_size % 8:
        raise weights.error("group_size", "a multiple of 8, the int4 values in a packed word")
    return QuantizationConfig(method=QuantizationMethod.INT4, group_size=group_size, ignore=_read_ignore(fields))


def _read_fp8(fields: JsonFields) -> QuantizationConfig:
    fields.require("fmt", "e4m3", "float8_e4m3fn")
    fields.require("activation_scheme", "dynamic")
    fields.require("scale_fmt", "float")
    blocks = fields.integers("weight_block_size", minimum=1)
    if not blocks:
        blocks = (DEFAULT_FP8_BLOCK_SIZE, DEFAULT_FP8_BLOCK_SIZE)
    if len(blocks) != 2 or blocks[0] != blocks[1]:
        raise fields.error("weight_block_size", "two equal positive integers, such as [128, 128]")
    return QuantizationConfig(method=QuantizationMethod.FP8, block_size=blocks[0], ignore=_read_ignore(fields))


def _read_ignore(fields: JsonFields) -> tuple[str, ...]:
    patterns = (
        *fields.strings("ignore"),
        *fields.strings("modules_to_not_convert"),
        *fields.strings("ignored_layers"),
    )
    for pattern in patterns:
        if pattern.startswith("re:"):
            try:
                re.compile(pattern[3:])
            # Beside re.error: too large a repetition count, too many nested groups.
            except (re.error, OverflowError, RecursionError) as error:
                raise ConfigError(
                    f"{fields.path}: ignore holds {pattern[:100]!r}, expected a regular expression after 're:'"
                    f" ({error})"
                ) from error
    return patterns
