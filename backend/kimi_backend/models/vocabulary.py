"""A draft's vocabulary map, from the tensors of its checkpoint.

| tensor | shape | meaning |
|---|---|---|
| d2t | [draft_vocab_size] int64 | offset: column c of the draft's logits is the target's token c + d2t[c] |
| t2d | [vocab_size] bool | whether the draft knows the token |

A draft of the full vocabulary has neither, or an identity.
"""

import torch

from kimi_backend.checkpoint.tensor_source import TensorSource
from kimi_backend.errors import CheckpointError
from kimi_kernels.sampling_inputs import VocabularyMap


def load_vocabulary_map(
    source: TensorSource, draft_vocab_size: int, vocab_size: int, device: torch.device
) -> VocabularyMap | None:
    """The map of a checkpoint; None when column c is token c.

    Raises:
        CheckpointError: the map is missing, leaves the vocabulary, is not strictly increasing (as where absolute ids
            stand in place of offsets), or d2t and t2d disagree.
    """
    names = source.names()
    if draft_vocab_size < vocab_size and not names & {"d2t", "t2d"}:
        raise CheckpointError(
            "d2t",
            [f"missing: expected offsets of {draft_vocab_size} draft tokens in a vocabulary of {vocab_size}"],
        )
    from_mask = _tokens_of_mask(source, draft_vocab_size, vocab_size) if "t2d" in names else None
    from_offsets = _tokens_of_offsets(source, draft_vocab_size, vocab_size) if "d2t" in names else None
    if from_mask is not None and from_offsets is not None and not torch.equal(from_mask, from_offsets):
        column = int((from_mask != from_offsets).nonzero()[0])
        raise CheckpointError(
            "d2t",
            [f"column {column} is token {int(from_offsets[column])}, but t2d says token {int(from_mask[column])}"],
        )
    token_ids = from_offsets if from_offsets is not None else from_mask
    if token_ids is None or draft_vocab_size == vocab_size:
        return None
    return vocabulary_map(token_ids, vocab_size, device)


def vocabulary_map(token_ids: torch.Tensor, vocab_size: int, device: torch.device) -> VocabularyMap:
    """token_ids: [num_columns] int64, distinct ids of the target."""
    columns = torch.full((vocab_size,), -1, dtype=torch.int64)
    columns[token_ids] = torch.arange(len(token_ids))
    return VocabularyMap(token_id_of_column=token_ids.to(device), column_of_token_id=columns.to(device))


def _tokens_of_offsets(source: TensorSource, draft_vocab_size: int, vocab_size: int) -> torch.Tensor:
    if source.shape("d2t") != (draft_vocab_size,):
        raise CheckpointError("d2t", [f"expected shape [{draft_vocab_size}], found {list(source.shape('d2t'))}"])
    token_ids = source.read("d2t").long() + torch.arange(draft_vocab_size)
    outside = ((token_ids < 0) | (token_ids >= vocab_size)).nonzero()
    if len(outside):
        column = int(outside[0])
        raise CheckpointError(
            "d2t", [f"column {column} is token {int(token_ids[column])}, expected 0 to {vocab_size - 1}"]
        )
    falling = (token_ids[1:] <= token_ids[:-1]).nonzero()
    if len(falling):
        column = int(falling[0])
        raise CheckpointError(
            "d2t",
            [
                f"columns {column} and {column + 1} are tokens {int(token_ids[column])} and"
                f" {int(token_ids[column + 1])}, expected strictly increasing tokens (are these ids, not offsets?)"
            ],
        )
    return token_ids


def _tokens_of_mask(source: TensorSource, draft_vocab_size: int, vocab_size: int) -> torch.Tensor:
    if source.shape("t2d") != (vocab_size,):
        raise CheckpointError("t2d", [f"expected shape [{vocab_size}], found {list(source.shape('t2d'))}"])
    token_ids = source.read("t2d").bool().nonzero()[:, 0]
    if len(token_ids) != draft_vocab_size:
        raise CheckpointError(
            "t2d", [f"{len(token_ids)} tokens are set, expected draft_vocab_size ({draft_vocab_size})"]
        )
    return token_ids
