"""A draft's vocabulary map on a device; `checkpoint.vocabulary_map` says what its tensors mean."""

import torch

from kimi_backend.checkpoint.tensor_source import TensorSource
from kimi_backend.checkpoint.vocabulary_map import draft_token_ids
from kimi_kernels.sampling_inputs import VocabularyMap


def load_vocabulary_map(
    source: TensorSource, draft_vocab_size: int, vocab_size: int, device: torch.device
) -> VocabularyMap | None:
    """The map of a checkpoint; None when column c is token c.

    Raises:
        CheckpointError: see `draft_token_ids`.
    """
    token_ids = draft_token_ids(source, draft_vocab_size, vocab_size, "vocabulary map")
    return None if token_ids is None else vocabulary_map(token_ids, vocab_size, device)


def vocabulary_map(token_ids: torch.Tensor, vocab_size: int, device: torch.device) -> VocabularyMap:
    """token_ids: [num_columns] int64, distinct ids of the target."""
    columns = torch.full((vocab_size,), -1, dtype=torch.int64)
    columns[token_ids] = torch.arange(len(token_ids))
    return VocabularyMap(token_id_of_column=token_ids.to(device), column_of_token_id=columns.to(device))
