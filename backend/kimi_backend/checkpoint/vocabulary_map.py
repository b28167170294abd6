"""The tokens of the target that a draft's head knows, from the tensors of its checkpoint.

| tensor | shape | meaning |
|---|---|---|
| d2t | [draft_vocab_size] int64 | offset: column c of the draft's logits is the target's token c + d2t[c] |
| t2d | [vocab_size] bool | whether the draft knows the token |

A draft of the full vocabulary has neither, or an identity. Some exporters write the tokens themselves into d2t; where
t2d tells, they are taken as that.
"""

import torch

from kimi_backend.checkpoint.tensor_source import TensorSource
from kimi_backend.errors import CheckpointError


def draft_token_ids(source: TensorSource, draft_vocab_size: int, vocab_size: int, subject: str) -> torch.Tensor | None:
    """[draft_vocab_size] int64, rising: the target's token of each column; None when column c is token c.

    Raises:
        CheckpointError: the map is missing, leaves the vocabulary, is not rising, or d2t and t2d disagree.
    """
    names = source.names()
    problems: list[str] = []
    known = _tokens_of_mask(source.read("t2d"), draft_vocab_size, vocab_size, problems) if "t2d" in names else None
    stored = source.read("d2t").long() if "d2t" in names else None
    if stored is not None and stored.shape != (draft_vocab_size,):
        problems.append(f"d2t: expected shape [{draft_vocab_size}], found {list(stored.shape)}")
    if draft_vocab_size < vocab_size and not names & {"d2t", "t2d"}:
        problems.append(f"d2t: missing, expected [{draft_vocab_size}] int64, since draft_vocab_size < vocab_size")
    token_ids = known
    if stored is not None and not problems:
        if known is not None and torch.equal(stored, known):
            return known if draft_vocab_size < vocab_size else None
        token_ids = stored + torch.arange(draft_vocab_size)
        problems += _misplaced(token_ids, vocab_size) or _disagreement(token_ids, known)
    if problems:
        raise CheckpointError(subject, problems)
    return token_ids if draft_vocab_size < vocab_size else None


def _tokens_of_mask(
    mask: torch.Tensor, draft_vocab_size: int, vocab_size: int, problems: list[str]
) -> torch.Tensor | None:
    if mask.shape != (vocab_size,):
        problems.append(f"t2d: expected shape [{vocab_size}], found {list(mask.shape)}")
        return None
    known = mask.bool().nonzero()[:, 0]
    if len(known) != draft_vocab_size:
        problems.append(f"t2d: expected {draft_vocab_size} target ids marked, found {len(known)}")
        return None
    return known


def _misplaced(token_ids: torch.Tensor, vocab_size: int) -> list[str]:
    outside = ((token_ids < 0) | (token_ids >= vocab_size)).nonzero().flatten()
    if outside.numel():
        first = int(outside[0])
        return [
            f"d2t: expected target ids from 0 to {vocab_size - 1}, found {int(token_ids[first])} for draft id {first}"
            " (d2t holds offsets: target id = draft id + d2t[draft id])"
        ]
    falls = (token_ids[1:] <= token_ids[:-1]).nonzero().flatten()
    if falls.numel():
        first = int(falls[0])
        return [
            f"d2t: expected rising target ids, found {int(token_ids[first])} then {int(token_ids[first + 1])}"
            f" for draft ids {first} and {first + 1} (d2t holds offsets: target id = draft id + d2t[draft id])"
        ]
    return []


def _disagreement(token_ids: torch.Tensor, known: torch.Tensor | None) -> list[str]:
    if known is None or torch.equal(known, token_ids):
        return []
    first = int((known != token_ids).nonzero()[0])
    return [
        f"t2d: expected the target ids of d2t, found id {int(known[first])} marked where draft id {first}"
        f" maps to {int(token_ids[first])}"
    ]
