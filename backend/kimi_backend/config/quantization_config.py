"""How a checkpoint stores its linear layers: as they are, int4 in groups, or fp8 in blocks."""

from dataclasses import dataclass
from enum import Enum

import regex

from kimi_backend.config.json_fields import JsonFields
from kimi_backend.errors import ConfigError

DEFAULT_FP8_BLOCK_SIZE = 128
TEXT_PREFIX = "language_model."
_MATCH_S = 1.0
"""For one pattern of a checkpoint, which may be one that never comes to an end."""


class QuantizationMethod(str, Enum):
    """Storage of the routed experts; the one difference between the families that kernels see."""

    NONE = "none"
    INT4 = "int4"
    """compressed-tensors pack-quantized, symmetric, in groups along the input (K2-Thinking, K2.5, K2.6)."""
    FP8 = "fp8"
    """float8_e4m3fn with a scale for each square block (K2)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizationConfig:
    """A checkpoint's `quantization_config`."""

    method: QuantizationMethod = QuantizationMethod.NONE
    group_size: int = 0
    """int4: input columns that share a scale."""
    block_size: int = 0
    """fp8: side of the square that shares a scale."""
    targets: tuple[str, ...] = ("Linear",)
    """Modules that are quantised: their class, names, or regular expressions after "re:"."""
    ignore: tuple[str, ...] = ()
    """Modules that are not quantised although they are targets: likewise."""

    @classmethod
    def from_fields(cls, fields: JsonFields | None) -> "QuantizationConfig":
        """Read a `quantization_config`; None or {} means there is none.

        Raises:
            ConfigError: a method, layout or number that is not supported, by name.
        """
        if fields is None or not fields.data:
            return cls()
        method = fields.choice("quant_method", ("compressed-tensors", "fp8"))
        return _read_int4(fields) if method == "compressed-tensors" else _read_fp8(fields)

    def quantizes(self, module: str) -> bool:
        """Whether the linear layer of that name (without `language_model.`) is stored quantised."""
        if self.method is QuantizationMethod.NONE or module.endswith("lm_head"):
            return False
        names = _spellings(module)
        is_target = "Linear" in self.targets or any(_matches(pattern, names) for pattern in self.targets)
        return is_target and not any(_matches(pattern, names) for pattern in self.ignore)


def _spellings(module: str) -> tuple[str, ...]:
    """The names that files give a module: of a multimodal model, and of a draft's first layer."""
    if module.startswith("model."):
        return (module, TEXT_PREFIX + module, f"model.{TEXT_PREFIX}{module.removeprefix('model.')}")
    first = [module.replace("layers.0.", "midlayer.", 1)] if module.startswith("layers.0.") else []
    return tuple(prefix + name for name in (module, *first) for prefix in ("", "model."))


def _matches(pattern: str, names: tuple[str, ...]) -> bool:
    if pattern.startswith("re:"):
        try:
            return any(regex.match(pattern[3:], name, timeout=_MATCH_S) for name in names)
        except TimeoutError:
            raise ConfigError(
                f"quantization_config: {pattern[:100]!r} takes more than {_MATCH_S:g} s to match"
            ) from None
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
    targets = _read_patterns(group, "targets")
    if not targets:
        raise group.error("targets", "['Linear'], or the names of the routed experts")
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
    # "static" and its newer name "weight" order the columns while they are rounded, and store them as they were.
    weights.require("actorder", "static", "weight", False, takes="columns in another order, with their index")
    weights.require("dynamic", False)
    group_size = weights.integer("group_size", minimum=8)
    if group_size % 8:
        raise weights.error("group_size", "a multiple of 8, the int4 values in a packed word")
    return QuantizationConfig(
        method=QuantizationMethod.INT4, group_size=group_size, targets=targets, ignore=_read_patterns(fields, "ignore")
    )


def _read_fp8(fields: JsonFields) -> QuantizationConfig:
    fields.require("fmt", "e4m3", "float8_e4m3fn")
    fields.require("activation_scheme", "dynamic")
    fields.require("scale_fmt", "float", "ue8m0")
    blocks = fields.integers("weight_block_size", minimum=1)
    if not blocks:
        blocks = (DEFAULT_FP8_BLOCK_SIZE, DEFAULT_FP8_BLOCK_SIZE)
    if len(blocks) != 2 or blocks[0] != blocks[1]:
        raise fields.error("weight_block_size", "two equal positive integers, such as [128, 128]")
    ignored = (_read_patterns(fields, name) for name in ("ignore", "modules_to_not_convert", "ignored_layers"))
    return QuantizationConfig(
        method=QuantizationMethod.FP8, block_size=blocks[0], ignore=tuple(name for names in ignored for name in names)
    )


def _read_patterns(fields: JsonFields, field: str) -> tuple[str, ...]:
    """A list of modules: names, or regular expressions after "re:"."""
    patterns = fields.strings(field)
    for pattern in patterns:
        if pattern.startswith("re:"):
            try:
                regex.compile(pattern[3:])
            # Beside regex.error: too large a repetition count, too many nested groups.
            except (regex.error, OverflowError, RecursionError, MemoryError) as error:
                raise ConfigError(
                    f"{fields.path}: {field} holds {pattern[:100]!r}, expected a regular expression after 're:'"
                    f" ({error})"
                ) from error
    return patterns
