"""The tokens that a draft's head knows: d2t and t2d in every form that exporters write, and what contradicts them."""

import pytest
import torch

from kimi_backend.checkpoint.tensor_source import InMemoryTensors
from kimi_backend.checkpoint.vocabulary_map import draft_token_ids
from kimi_backend.errors import CheckpointError

KNOWN = torch.tensor([1, 2, 5])
OFFSETS = KNOWN - torch.arange(3)
MASK = torch.tensor([False, True, True, False, False, True])


def found(draft_vocab_size: int = 3, **tensors: torch.Tensor) -> torch.Tensor | None:
    return draft_token_ids(InMemoryTensors(tensors), draft_vocab_size, 6, "the draft")


@pytest.mark.parametrize(
    "tensors",
    [{"d2t": OFFSETS}, {"t2d": MASK}, {"d2t": OFFSETS, "t2d": MASK}, {"d2t": KNOWN, "t2d": MASK}],
    ids=["offsets", "a mask", "both", "the tokens themselves, and a mask"],
)
def test_every_form_says_the_same(tensors: dict[str, torch.Tensor]) -> None:
    token_ids = found(**tensors)
    assert token_ids is not None
    assert torch.equal(token_ids, KNOWN)


def test_a_draft_of_the_full_vocabulary_has_no_map() -> None:
    everything = torch.ones(6, dtype=torch.bool)
    assert found(6) is None
    assert found(6, d2t=torch.zeros(6, dtype=torch.int64), t2d=everything) is None
    assert found(6, d2t=torch.arange(6), t2d=everything) is None


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({}, r"d2t: missing, expected \[3\] int64"),
        ({"d2t": OFFSETS[:2]}, r"d2t: expected shape \[3\], found \[2\]"),
        ({"t2d": MASK[:5]}, r"t2d: expected shape \[6\], found \[5\]"),
        ({"t2d": torch.zeros(6, dtype=torch.bool)}, "t2d: expected 3 target ids marked, found 0"),
        ({"d2t": torch.tensor([-1, 0, 0])}, "d2t: expected target ids from 0 to 5, found -1 for draft id 0"),
        ({"d2t": torch.tensor([0, 0, 4])}, "d2t: expected target ids from 0 to 5, found 6 for draft id 2"),
        ({"d2t": torch.tensor([1, 0, 0])}, "expected rising target ids, found 1 then 1 for draft ids 0 and 1"),
        ({"d2t": torch.tensor([1, 1, 2]), "t2d": MASK}, "found id 5 marked where draft id 2 maps to 4"),
    ],
)
def test_what_contradicts_is_named(tensors: dict[str, torch.Tensor], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        found(**tensors)
