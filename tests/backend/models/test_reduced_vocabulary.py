"""A draft with fewer tokens is the same draft with the other tokens masked."""

from pathlib import Path

import pytest
import torch

from kimi_backend.checkpoint.loading import DraftCheckpoint
from kimi_backend.checkpoint.tensor_source import InMemoryTensors
from kimi_backend.checkpoint.token_counts import TokenCounts
from kimi_backend.errors import ConfigError
from kimi_backend.models.eagle3_draft import Eagle3Draft
from kimi_backend.models.eagle3_mha import Eagle3MhaDraft
from kimi_backend.models.eagle3_mla import Eagle3MlaDraft
from kimi_backend.models.reduced_vocabulary import reduce_vocabulary
from kimi_backend.parallel import SingleRank
from kimi_kernels.kernel_set import KernelSet
from support.tiny_checkpoints import random_draft, random_target
from support.tiny_configs import draft_config, target_config

CPU = torch.device("cpu")
TARGET = target_config()
TARGET_TENSORS = InMemoryTensors(random_target(TARGET))
COUNTS = TokenCounts.of({token: 1 + (token * 37) % 96 for token in range(96)}, TARGET.vocab_size)
KEPT = 20


def checkpoint(kind: str, draft_vocab_size: int, *, with_head: bool = True) -> DraftCheckpoint:
    config = draft_config(kind, TARGET, draft_vocab_size=draft_vocab_size)
    source = InMemoryTensors(random_draft(config, with_head=with_head))
    return DraftCheckpoint(Path("draft"), config, source, source, 0)


def build(draft: DraftCheckpoint, rank: SingleRank | None = None) -> Eagle3Draft:
    kind = Eagle3MlaDraft if "mla" in type(draft.config).__name__.lower() else Eagle3MhaDraft
    return kind(draft.config, draft.tensors, KernelSet.plain(), rank or SingleRank(), CPU, torch.float32)  # type: ignore[arg-type]


def normed(num_rows: int = 40) -> torch.Tensor:
    return torch.randn(num_rows, 64, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("kind", ["mla", "mha"])
@pytest.mark.parametrize("draft_vocab_size", [96, 48])
def test_it_proposes_what_the_whole_draft_would_among_its_tokens(kind: str, draft_vocab_size: int) -> None:
    whole = checkpoint(kind, draft_vocab_size)
    reduced = build(reduce_vocabulary(whole, TARGET_TENSORS, KEPT, COUNTS))
    assert reduced.config.draft_vocab_size == KEPT
    reference = build(whole)
    own_ids = (
        torch.arange(96) if reference.vocabulary_map is None else reference.vocabulary_map.token_id_of_column
    ).tolist()
    frequent = [token for token in COUNTS.token_ids if token in own_ids][:KEPT]
    columns = torch.tensor([own_ids.index(token) for token in sorted(frequent)])
    logits = reference.compute_logits(normed())[:, columns]
    assert torch.equal(reduced.compute_logits(normed()), logits)
    best = torch.tensor(sorted(frequent))[logits.argmax(dim=1)]
    assert torch.equal(reduced.argmax(normed())[1], best)


def test_all_of_its_tokens_change_nothing() -> None:
    whole = checkpoint("mla", 96)
    reduced = build(reduce_vocabulary(whole, TARGET_TENSORS, 96, COUNTS))
    assert torch.equal(reduced.compute_logits(normed()), build(whole).compute_logits(normed()))
    assert reduced.vocabulary_map is None


def test_rows_come_from_the_target_where_the_draft_has_no_head() -> None:
    reduced = build(reduce_vocabulary(checkpoint("mla", 96, with_head=False), TARGET_TENSORS, KEPT, COUNTS))
    kept = torch.tensor(sorted(COUNTS.token_ids[:KEPT]))
    expected = normed() @ TARGET_TENSORS.read("lm_head.weight")[kept].T
    torch.testing.assert_close(reduced.compute_logits(normed()), expected)


def test_a_rank_holds_its_part_of_the_kept_rows() -> None:
    reduced = reduce_vocabulary(checkpoint("mla", 96), TARGET_TENSORS, KEPT, COUNTS)
    parts = [reduced.tensors.read("lm_head.weight", 0, start, start + KEPT // 2) for start in (0, KEPT // 2)]
    assert torch.equal(torch.cat(parts), reduced.tensors.read("lm_head.weight"))
    assert reduced.tensors.shape("lm_head.weight") == (KEPT, 64)
    assert (reduced.tensors.shape("d2t"), reduced.tensors.dtype("d2t")) == ((KEPT,), torch.int64)
    assert reduced.tensors.dtype("norm.weight") == checkpoint("mla", 96).tensors.dtype("norm.weight")


def test_uncounted_tokens_fill_up_by_id() -> None:
    counts = TokenCounts.of({7: 3, 90: 2}, TARGET.vocab_size)
    reduced = build(reduce_vocabulary(checkpoint("mla", 96), TARGET_TENSORS, 5, counts))
    assert reduced.vocabulary_map is not None
    assert reduced.vocabulary_map.token_id_of_column.tolist() == [0, 1, 2, 7, 90]


@pytest.mark.parametrize(
    ("num_tokens", "counts", "message"),
    [
        (49, COUNTS, "draft_vocab: 49 given, at most 48 is allowed"),
        (8, TokenCounts.of({1: 1}, 95), "a vocabulary of 95, one of 96 is needed"),
    ],
)
def test_what_does_not_fit_is_refused(num_tokens: int, counts: TokenCounts, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        reduce_vocabulary(checkpoint("mha", 48), TARGET_TENSORS, num_tokens, counts)
