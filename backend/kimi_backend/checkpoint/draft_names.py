"""Draft checkpoints spell the same tensors in several ways; one canonical spelling for all."""

from dataclasses import dataclass, field

import torch

from kimi_backend.checkpoint.tensor_source import TensorSource
from kimi_backend.errors import CheckpointError

_MODEL_PREFIX = "model."
_MIDLAYER_PREFIX = "midlayer."
_LAYER_PREFIX = "layers.0."


def canonical_draft_name(name: str) -> str:
    """`midlayer.` and `layers.0.` are one layer, and a leading `model.` means nothing."""
    name = name.removeprefix(_MODEL_PREFIX)
    return _LAYER_PREFIX + name.removeprefix(_MIDLAYER_PREFIX) if name.startswith(_MIDLAYER_PREFIX) else name


@dataclass(frozen=True, slots=True)
class DraftTensors:
    """A draft's tensors under their canonical names.

    Raises:
        CheckpointError: two tensors have one canonical name.
    """

    source: TensorSource
    subject: str
    """What errors call the checkpoint, such as its path."""
    _stored_names: dict[str, str] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        stored: dict[str, str] = {}
        problems = []
        for name in sorted(self.source.names()):
            other = stored.setdefault(canonical_draft_name(name), name)
            if other != name:
                problems.append(f"tensors {other!r} and {name!r} are the same one, expected only one of them")
        if problems:
            raise CheckpointError(self.subject, problems)
        object.__setattr__(self, "_stored_names", stored)

    def names(self) -> frozenset[str]:
        return frozenset(self._stored_names)

    def shape(self, name: str) -> tuple[int, ...]:
        return self.source.shape(self._stored(name))

    def dtype(self, name: str) -> torch.dtype:
        return self.source.dtype(self._stored(name))

    def read(self, name: str, dim: int = 0, start: int = 0, stop: int | None = None) -> torch.Tensor:
        return self.source.read(self._stored(name), dim, start, stop)

    def _stored(self, name: str) -> str:
        # An unknown name goes to the source as it is, which knows how to say that it is missing.
        return self._stored_names.get(name, name)
