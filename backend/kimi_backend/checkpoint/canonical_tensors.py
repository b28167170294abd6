"""Checkpoints spell and stack the same tensors in several ways; one canonical spelling for all."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from kimi_backend.checkpoint.tensor_source import TensorSource
from kimi_backend.checkpoint.tensor_spec import Specs, TensorRole
from kimi_backend.errors import CheckpointError

_FUSED = {
    "fused_qkv_a_proj_with_mqa": ("q_a_proj", "kv_a_proj_with_mqa"),
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
"""Matrices that some files stack, one above the other."""
_MIDLAYER = re.compile(r"midlayer\.(?:(\d+)\.)?")
EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"


def canonical_draft_name(name: str) -> str:
    """`midlayer.` is `layers.0.`, `midlayer.1.` is `layers.1.`, and a leading `model.` means nothing."""
    return _MIDLAYER.sub(lambda found: f"layers.{found.group(1) or 0}.", name.removeprefix("model."), count=1)


@dataclass(frozen=True, slots=True)
class _Part:
    """Rows of a stored tensor; all of them where `stop` is None."""

    stored_name: str
    start: int = 0
    stop: int | None = None


@dataclass(frozen=True, slots=True)
class CanonicalTensors:
    """A checkpoint's tensors under the names, and in the parts, that the models ask for."""

    source: TensorSource
    _parts: Mapping[str, _Part]
    _names: frozenset[str]

    @classmethod
    def of_target(cls, source: TensorSource, specs: Specs, subject: str) -> "CanonicalTensors":
        """
        Args:
            specs: the tensors that the config means; a fused tensor becomes those of them that it holds.
            subject: what errors call the checkpoint, such as its path.
        Raises:
            CheckpointError: two tensors are the same one, or a fused tensor's rows are not those of its parts.
        """
        return cls._of(source, _find_parts(source, specs, subject, lambda name: name))

    @classmethod
    def of_draft(
        cls, source: TensorSource, specs: Specs, subject: str, *, ties_head: bool = False
    ) -> "CanonicalTensors":
        """A draft's, with the arguments and errors of `of_target`.

        Args:
            ties_head: a head that is not in the file is the embedding.
        """
        parts = _find_parts(source, specs, subject, canonical_draft_name)
        if ties_head and HEAD not in parts and EMBEDDING in parts and specs[HEAD].shape == specs[EMBEDDING].shape:
            parts[HEAD] = parts[EMBEDDING]
        return cls._of(source, parts)

    @classmethod
    def _of(cls, source: TensorSource, parts: Mapping[str, _Part]) -> "CanonicalTensors":
        return cls(source, parts, frozenset(parts))

    def names(self) -> frozenset[str]:
        return self._names

    def shape(self, name: str) -> tuple[int, ...]:
        part = self._part(name)
        shape = self.source.shape(part.stored_name)
        return shape if part.stop is None else (part.stop - part.start, *shape[1:])

    def dtype(self, name: str) -> torch.dtype:
        return self.source.dtype(self._part(name).stored_name)

    def read(self, name: str, dim: int = 0, start: int = 0, stop: int | None = None) -> torch.Tensor:
        part = self._part(name)
        if part.stop is None:
            return self.source.read(part.stored_name, dim, start, stop)
        if dim == 0:
            stop = part.stop if stop is None else part.start + stop
            return self.source.read(part.stored_name, 0, part.start + start, stop)
        rows = self.source.read(part.stored_name, 0, part.start, part.stop)
        return rows.narrow(dim, start, (rows.shape[dim] if stop is None else stop) - start)

    def _part(self, name: str) -> _Part:
        # An unknown name goes to the source as it is, which knows how to say that it is missing.
        return self._parts.get(name, _Part(name))


def _find_parts(source: TensorSource, specs: Specs, subject: str, canonical: Callable[[str], str]) -> dict[str, _Part]:
    parts: dict[str, _Part] = {}
    problems: list[str] = []
    for stored_name in sorted(source.names()):
        for name, part in _split(source, specs, stored_name, canonical(stored_name), problems).items():
            other = parts.setdefault(name, part)
            if other != part:
                problems.append(
                    f"tensors {other.stored_name!r} and {stored_name!r} are the same one, expected only one of them"
                )
    if problems:
        raise CheckpointError(subject, problems)
    return parts


def _split(source: TensorSource, specs: Specs, stored_name: str, name: str, problems: list[str]) -> dict[str, _Part]:
    """The tensors that a stored one holds: itself, unless it is a fused one whose parts the specs name."""
    module, _, suffix = name.rpartition(".")
    prefix, _, fused = module.rpartition(".")
    names = [f"{prefix}.{part}.{suffix}" for part in _FUSED.get(fused, ())]
    if not names or name in specs or not all(part in specs for part in names):
        return {name: _Part(stored_name)}
    first = specs[names[0]]
    if first.role is TensorRole.INT4_SHAPE:
        return {}  # says the fused shape
    if first.role is TensorRole.FP8_SCALES and not first.rows_each:
        return {part: _Part(stored_name) for part in names}  # one scale for all
    sizes = [specs[part].shape[0] for part in names]
    num_rows = source.shape(stored_name)[0] if source.shape(stored_name) else 0
    if num_rows != sum(sizes) or any(_cuts_a_block(specs, part) for part in names[:-1]):
        problems.append(f"{stored_name}: expected the rows {sizes} of {', '.join(names)}, found {num_rows} rows")
        return {}
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return {
        part: _Part(stored_name, start, start + size) for part, start, size in zip(names, starts, sizes, strict=True)
    }


def _cuts_a_block(specs: Specs, name: str) -> bool:
    """A part's last row of fp8 blocks would reach into the next part."""
    spec = specs[name]
    return spec.rows_each * spec.shape[0] != spec.matrix_shape[0] if spec.rows_each and spec.matrix_shape else False
