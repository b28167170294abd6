"""The rows that draw a token: listed one by one for few sequences, by array operations for many, and both the same."""

import random
from dataclasses import fields, replace

import numpy as np
import pytest

from kimi_backend.runners.sampled_rows import SampledRows
from kimi_backend.types.plan import RowPlan, SamplingPlan, TargetPlan


def random_plan(rng: random.Random) -> TargetPlan:
    """Verifies of 0 to 7 draft tokens, ends of prompts, and chunks that sample nothing."""
    num_seqs = rng.randint(1, 8)
    query_lens = [rng.choice((1, 2, 4, 8, 20)) for _ in range(num_seqs)]
    num_sampled = [rng.choice((0, 1)) if length == 20 else rng.choice((length, 1)) for length in query_lens]
    total = sum(query_lens)
    return TargetPlan.given(
        step_id=1,
        rows=RowPlan(
            token_ids=np.array([rng.randint(0, 999) for _ in range(total)], np.int32),
            query_lens=np.array(query_lens, np.int32),
            seq_lens=np.array([length + rng.randint(0, 50) for length in query_lens], np.int32),
            block_table=np.zeros((num_seqs, 2), np.int32),
        ),
        num_sampled_rows=np.array(num_sampled, np.int32),
        sampling=SamplingPlan.plain(sum(count > 0 for count in num_sampled)),
        num_logprobs=None,
        wants_aux=np.zeros(num_seqs, np.bool_),
    )


@pytest.mark.parametrize("seed", range(40))
def test_few_and_many_agree(seed: int) -> None:
    plan = random_plan(random.Random(seed))
    few, many = SampledRows.of_few(plan), SampledRows.of_many(plan)
    for field in fields(SampledRows):
        one, other = getattr(few, field.name), getattr(many, field.name)
        assert one.dtype == other.dtype, field.name
        assert one.shape == other.shape, field.name
        assert one.tolist() == other.tolist(), field.name


@pytest.mark.parametrize("num_seqs", [16, 17])
def test_either_way_is_taken(num_seqs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = replace(random_plan(random.Random(0)), num_sampled_rows=np.ones(num_seqs, np.int32))
    for name in ("of_few", "of_many"):
        monkeypatch.setattr(SampledRows, name, lambda plan, name=name: name)
    assert SampledRows.of(plan) == ("of_few" if num_seqs == 16 else "of_many")  # type: ignore[comparison-overlap]
