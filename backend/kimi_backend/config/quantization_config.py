"""The formats of a checkpoint's linear layers: as they are, or one of the quantised ones; which layers in which."""

import fnmatch
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

import regex

from kimi_backend.errors import ConfigError

TEXT_PREFIX = "language_model."
_MATCH_S = 1.0
"""The time for one pattern of a checkpoint, which may be one that never comes to an end."""


class QuantizationMethod(str, Enum):
    """Storage of a linear layer; that of the routed experts is what kernels see of it."""

    NONE = "none"
    INT4 = "int4"
    """compressed-tensors pack-quantized, symmetric, in groups along the input (K2-Thinking, K2.5, K2.6)."""
    FP8 = "fp8"
    """float8_e4m3fn with a scale for each square block (K2) or, outside the experts, for each row or the matrix."""
    MXFP4 = "mxfp4"
    """e2m1 with an e8m0 scale for each group of 32 along the input (quark, compressed-tensors)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFormat:
    """The format of one linear layer: `module.values` and `module.scales` are its tensors."""

    method: QuantizationMethod = QuantizationMethod.NONE
    group_size: int = 0
    """int4 and mxfp4: input columns that share a scale."""
    block_size: int = 0
    """fp8: side of the square that shares a scale; 0 is a scale for each row, or for the matrix."""
    values: str = "weight"
    scales: str = ""
    has_one_scale: bool = False
    """fp8: the whole matrix shares a scale."""

    def describe(self) -> str:
        if self.group_size:
            return f"{self.method.value} in groups of {self.group_size}"
        if self.block_size:
            return f"{self.method.value} in blocks of {self.block_size} x {self.block_size}"
        return f"{self.method.value} with a scale a {'matrix' if self.has_one_scale else 'row'}"


AS_IT_IS = StoredFormat()


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizationConfig:
    """A checkpoint's `quantization_config`."""

    default: StoredFormat = AS_IT_IS
    """The format of every target that has none of its own."""
    targets: tuple[str, ...] = ("Linear",)
    """Modules that are quantised: their class, names, or patterns."""
    ignore: tuple[str, ...] = ()
    """Modules that are not quantised although they are targets: likewise."""
    special: tuple[tuple[str, StoredFormat], ...] = ()
    """Modules of another format than the default: a pattern and theirs. The first that matches holds."""

    @property
    def method(self) -> QuantizationMethod:
        return self.default.method

    @property
    def formats(self) -> tuple[StoredFormat, ...]:
        return (self.default, *(stored for _, stored in self.special))

    @property
    def fp8_block_size(self) -> int:
        """Rows of the square blocks of any layer; 0 where there are none."""
        return max(stored.block_size for stored in self.formats)

    def stored(self, module: str) -> StoredFormat:
        """The format of the linear layer of that name (without `language_model.`)."""
        names = _spellings(module)
        if module.endswith("lm_head") or any(_matches(pattern, names) for pattern in self.ignore):
            return AS_IT_IS
        for pattern, stored in self.special:
            if _matches(pattern, names):
                return stored
        is_target = "Linear" in self.targets or any(_matches(pattern, names) for pattern in self.targets)
        return self.default if is_target else AS_IT_IS

    def quantizes(self, module: str) -> bool:
        """True where the linear layer of that name is stored quantised."""
        return self.stored(module).method is not QuantizationMethod.NONE

    def patterns(self) -> Iterator[str]:
        yield from (*self.targets, *self.ignore)
        yield from (pattern for pattern, _ in self.special)


def _spellings(module: str) -> tuple[str, ...]:
    """The names that files give a module: of a multimodal model, and of a draft's first layer."""
    if module.startswith("model."):
        return (module, TEXT_PREFIX + module, f"model.{TEXT_PREFIX}{module.removeprefix('model.')}")
    first = [module.replace("layers.0.", "midlayer.", 1)] if module.startswith("layers.0.") else []
    return tuple(prefix + name for name in (module, *first) for prefix in ("", "model."))


@functools.lru_cache(maxsize=1024)
def _expression(pattern: str) -> regex.Pattern[str] | None:
    if pattern.startswith("re:"):
        return regex.compile(pattern[3:])
    return regex.compile(fnmatch.translate(pattern)) if "*" in pattern else None


def _matches(pattern: str, names: tuple[str, ...]) -> bool:
    """A pattern is a regular expression after "re:", a shell pattern with "*", or a module's or its parent's name."""
    expression = _expression(pattern)
    if expression is not None:
        try:
            return any(expression.match(name, timeout=_MATCH_S) for name in names)
        except TimeoutError:
            raise ConfigError(
                f"quantization_config: {pattern[:100]!r} takes more than {_MATCH_S:g} s to match"
            ) from None
    # "modules_to_not_convert" of fp8 files names parents; compressed-tensors files name the module itself.
    return any(name == pattern or name.startswith(pattern + ".") for name in names)
