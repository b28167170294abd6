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
        ({}, r"d2t: missing, expected \[4\] int64"),
        ({"d2t": TOKEN_IDS}, r"expected target ids from 0 to 9, found 12 for draft id 3 \(d2t holds offsets"),
        ({"d2t": torch.tensor([5, 1, 1, 1])}, "expected rising target ids, found 5 then 2 for draft ids 0 and 1"),
        ({"d2t": torch.tensor([3, 2, 2, 2])}, "expected rising target ids, found 3 then 3"),
        ({"d2t": torch.tensor([-1, 1, 1, 1])}, "found -1 for draft id 0"),
        ({"d2t": OFFSETS[:3]}, r"d2t: expected shape \[4\], found \[3\]"),
        ({"t2d": MASK[:9]}, r"t2d: expected shape \[10\], found \[9\]"),
        ({"t2d": ~MASK}, "t2d: expected 4 target ids marked, found 6"),
        ({"d2t": OFFSETS, "t2d": MASK.roll(1)}, "t2d: expected the target ids of d2t, found id 0 marked where"),
        ({"d2t": TOKEN_IDS, "t2d": MASK.roll(1)}, "d2t: expected target ids from 0 to 9, found 12"),
    ],
)
def test_a_wrong_map_is_refused_with_what_was_found(tensors: Tensors, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        load(tensors)


def test_absolute_ids_are_taken_where_the_mask_tells() -> None:
    loaded, offsets = load({"d2t": TOKEN_IDS, "t2d": MASK}), load({"d2t": OFFSETS})
    assert loaded is not None and offsets is not None
    assert torch.equal(loaded.token_id_of_column, offsets.token_id_of_column)
    full = {"d2t": torch.arange(VOCAB_SIZE), "t2d": torch.ones(VOCAB_SIZE, dtype=torch.bool)}
    assert load(full, VOCAB_SIZE) is None
