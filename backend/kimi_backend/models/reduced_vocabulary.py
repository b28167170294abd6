"""A draft whose head keeps only frequent tokens: fewer rows to read at every draft step.

The target decides every token, so a token that the draft cannot propose costs one rejection, never a change of text.
"""

from dataclasses import dataclass, replace

import torch

from kimi_backend.checkpoint.loading import DraftCheckpoint
from kimi_backend.checkpoint.tensor_source import TensorSource
from kimi_backend.checkpoint.token_counts import TokenCounts
from kimi_backend.errors import ConfigError
from kimi_backend.models.vocabulary import load_vocabulary_map

_HEAD = "lm_head.weight"


@dataclass(frozen=True, slots=True)
class ReducedVocabularyTensors:
    """A draft's tensors with some rows of its head, or of the target's where it has none of its own."""

    draft: TensorSource
    head: TensorSource
    """Holds `lm_head.weight`."""
    rows: torch.Tensor
    """[N] int64, rows of that matrix that are kept, rising."""
    token_ids: torch.Tensor
    """[N] int64, the target's ids of those rows, rising."""

    def names(self) -> frozenset[str]:
        return self.draft.names() - {"t2d"} | {_HEAD, "d2t"}

    def shape(self, name: str) -> tuple[int, ...]:
        if name == "d2t":
            return (len(self.token_ids),)
        if name == _HEAD:
            return (len(self.rows), *self.head.shape(_HEAD)[1:])
        return self.draft.shape(name)

    def dtype(self, name: str) -> torch.dtype:
        if name == "d2t":
            return torch.int64
        return self.head.dtype(_HEAD) if name == _HEAD else self.draft.dtype(name)

    def read(self, name: str, dim: int = 0, start: int = 0, stop: int | None = None) -> torch.Tensor:
        if name not in {"d2t", _HEAD}:
            return self.draft.read(name, dim, start, stop)
        if name == "d2t":
            tensor = self.token_ids - torch.arange(len(self.token_ids))
        else:
            whole = self.head.read(_HEAD)
            tensor = whole[self.rows.to(whole.device)]
        return tensor.narrow(dim, start, (tensor.shape[dim] if stop is None else stop) - start)


def reduce_vocabulary(
    draft: DraftCheckpoint, target: TensorSource, num_tokens: int, counts: TokenCounts
) -> DraftCheckpoint:
    """The same draft with the `num_tokens` most frequent of the tokens that it knows.

    Args:
        target: tensors of the target, whose head stands in where the draft has none.
    Raises:
        ConfigError: the draft knows fewer tokens, or the counts are those of another vocabulary.
    """
    config = draft.config
    if num_tokens > config.draft_vocab_size:
        raise ConfigError(
            f"setting draft_vocab: {num_tokens} given, at most {config.draft_vocab_size} is allowed,"
            " the tokens that the draft knows"
        )
    if counts.vocab_size != config.vocab_size:
        raise ConfigError(
            f"setting draft_vocab: the token counts are those of a vocabulary of {counts.vocab_size},"
            f" one of {config.vocab_size} is needed"
        )
    own = load_vocabulary_map(draft.tensors, config.draft_vocab_size, config.vocab_size, torch.device("cpu"))
    ranked = torch.tensor(counts.ranking())
    columns = ranked if own is None else own.column_of_token_id[ranked]
    # A draft's columns rise with their tokens, so both lists rise together.
    rows = columns[columns >= 0][:num_tokens].sort().values
    token_ids = rows if own is None else own.token_id_of_column[rows]
    head = draft.tensors if _HEAD in draft.tensors.names() else target
    tensors = ReducedVocabularyTensors(draft.tensors, head, rows, token_ids)
    return replace(draft, config=replace(config, draft_vocab_size=num_tokens), tensors=tensors)
