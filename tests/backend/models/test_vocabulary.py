import pytest
import torch

from kimi_backend.checkpoint.tensor_source import InMemoryTensors
from kimi_backend.errors import CheckpointError
from kimi_backend.models.vocabulary import load_vocabulary_map
from kimi_kernels.sampling_inputs import VocabularyMap
from support.tiny_checkpoints import Tensors

CPU = torch.device("cpu")
VOCAB_SIZE = 10
TOKEN_IDS = torch.tensor([1, 2, 5, 9])
OFFSETS = TOKEN_IDS - torch.arange(4)
MASK = torch.zeros(VOCAB_SIZE, dtype=torch.bool).index_fill(0, TOKEN_IDS, True)


def load(tensors: Tensors, size: int = 4) -> VocabularyMap | None:
    return load_vocabulary_map(InMemoryTensors(tensors), size, VOCAB_SIZE, CPU)


@pytest.mark.parametrize("tensors", [{"d2t": OFFSETS, "t2d": MASK}, {"d2t": OFFSETS}, {"t2d": MASK}])
def test_offsets_and_mask_give_the_same_map(tensors: Tensors) -> None:
    loaded = load(tensors)
    assert loaded is not None
    assert loaded.token_id_of_column.tolist() == [1, 2, 5, 9]
    assert loaded.column_of_token_id.tolist() == [-1, 0, 1, -1, -1, 2, -1, -1, -1, 3]


@pytest.mark.parametrize(
    "tensors",
    [{}, {"d2t": torch.zeros(VOCAB_SIZE, dtype=torch.int64), "t2d": torch.ones(VOCAB_SIZE, dtype=torch.bool)}],
)
def test_a_full_vocabulary_needs_no_map(tensors: Tensors) -> None:
    assert load(tensors, VOCAB_SIZE) is None


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({}, "d2t: missing: expected offsets of 4 draft tokens"),
        ({"d2t": TOKEN_IDS}, "column 3 is token 12, expected 0 to 9"),
        ({"d2t": torch.tensor([5, 1, 1, 1])}, r"columns 0 and 1 are tokens 5 and 2, expected strictly increasing"),
        ({"d2t": torch.tensor([3, 2, 2, 2])}, "columns 0 and 1 are tokens 3 and 3"),
        ({"d2t": torch.tensor([-1, 1, 1, 1])}, "column 0 is token -1"),
        ({"d2t": OFFSETS[:3]}, r"expected shape \[4\], found \[3\]"),
        ({"t2d": MASK[:9]}, r"t2d: expected shape \[10\], found \[9\]"),
        ({"t2d": ~MASK}, r"t2d: 6 tokens are set, expected draft_vocab_size \(4\)"),
        ({"d2t": OFFSETS, "t2d": MASK.roll(1)}, "column 0 is token 1, but t2d says token 0"),
    ],
)
def test_a_wrong_map_is_refused_with_what_was_found(tensors: Tensors, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        load(tensors)
