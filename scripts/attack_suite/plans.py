"""Plans as a caller that means harm would send them: good ones with a field, a number or a byte changed."""

import dataclasses
import random
from collections.abc import Iterator
from typing import Any

import numpy as np

from kimi_backend.types import codec
from kimi_backend.types.plan import (
    AuxHandle,
    DraftPlan,
    RowPlan,
    SamplingPlan,
    TargetPlan,
)

INTEGERS = (-(2**63), -(2**31), -(10**6), -2, -1, 0, 1, 2, 7, 8, 65, 10**6, 2**31 - 1, 2**31, 2**62, 2**63 - 1)
FLOATS = (float("nan"), float("inf"), float("-inf"), -1.0, 0.0, 1e-45, 1e-5, 1.0, 3e38)
STEP_ID = 2
_CONTEXT = 40
_BLOCKS = 8


def good_target_plan(num_seqs: int, k: int, vocab_size: int) -> TargetPlan:
    """A verify of sequences of 40 tokens, eight blocks each."""
    return TargetPlan(
        step_id=STEP_ID,
        rows=_rows(num_seqs, k + 1),
        num_sampled_rows=np.full(num_seqs, k + 1, np.int32),
        sampling=_sampling(num_seqs),
        num_logprobs=2,
        wants_aux=np.ones(num_seqs, np.bool_),
        table_rows=np.arange(num_seqs, dtype=np.int32),
        num_given=np.full(num_seqs, k + 1, np.int32),
        logit_mask=np.full((num_seqs, -(-vocab_size // 32)), -1, np.int32),
        masked_rows=np.arange(num_seqs, dtype=np.int32) * (k + 1),
    )


def plans_over_every_block() -> Iterator[TargetPlan]:
    """Prompts of one token 512 times, which between them write every slot of the first 128 blocks of 64."""
    for first in range(0, 128, _BLOCKS):
        length = _BLOCKS * 64
        yield TargetPlan(
            step_id=STEP_ID,
            rows=RowPlan(
                token_ids=np.ones(length, np.int32),
                query_lens=np.full(1, length, np.int32),
                seq_lens=np.full(1, length, np.int32),
                block_table=np.arange(first, first + _BLOCKS, dtype=np.int32)[None],
            ),
            num_sampled_rows=np.zeros(1, np.int32),
            sampling=SamplingPlan.plain(0),
            num_logprobs=None,
            wants_aux=np.zeros(1, np.bool_),
            table_rows=np.zeros(1, np.int32),
            num_given=np.full(1, length, np.int32),
        )


def good_draft_plan(num_seqs: int, k: int) -> DraftPlan:
    """The draft's step behind such a verify."""
    return DraftPlan(
        step_id=STEP_ID,
        rows=_rows(num_seqs, 2),
        aux=AuxHandle(region=0),
        aux_rows=np.arange(2 * num_seqs, dtype=np.int64),
        num_proposals=np.full(num_seqs, k, np.int32),
        sampling=_sampling(num_seqs),
        output_index=np.full(num_seqs, _CONTEXT + 1, np.int64),
        table_rows=np.arange(num_seqs, dtype=np.int32),
        num_drawn=np.zeros(num_seqs, np.int32),
        room=np.full(num_seqs, k, np.int32),
    )


def _rows(num_seqs: int, rows_each: int) -> RowPlan:
    return RowPlan(
        token_ids=np.ones(num_seqs * rows_each, np.int32),
        query_lens=np.full(num_seqs, rows_each, np.int32),
        seq_lens=np.full(num_seqs, _CONTEXT, np.int32),
        block_table=np.arange(num_seqs * _BLOCKS, dtype=np.int32).reshape(num_seqs, _BLOCKS),
    )


def _sampling(num_seqs: int) -> SamplingPlan:
    """Every sequence has an entry of each kind."""
    offsets, ids = np.arange(num_seqs + 1, dtype=np.int32), np.full(num_seqs, 5, np.int32)
    return SamplingPlan.plain(
        num_seqs,
        temperature=0.7,
        top_k=20,
        top_p=0.9,
        min_p=0.01,
        penalty_offsets=offsets,
        penalty_ids=ids,
        penalty_counts=ids,
        penalty_in_prompt=np.ones(num_seqs, np.bool_),
        bias_offsets=offsets,
        bias_ids=ids,
        bias_values=np.ones(num_seqs, np.float32),
        ban_offsets=offsets,
        ban_ids=ids,
        ban_until=np.full(num_seqs, 100, np.int64),
        bad_word_offsets=offsets,
        bad_word_token_offsets=offsets,
        bad_word_tokens=ids,
        history_tail=np.full((num_seqs, 2), 5, np.int32),
    )


def fuzzed_plans(
    role: str, count: int, vocab_size: int, seed: int = 0
) -> Iterator[np.ndarray[Any, np.dtype[np.uint8]]]:
    """Packed plans, the same for the same seed. role: "target" or "draft"."""
    rng = random.Random(f"{role} {seed}")
    for _ in range(count):
        num_seqs, k = rng.randint(1, 3), rng.randint(0, 7)
        plan: Any = good_target_plan(num_seqs, k, vocab_size) if role == "target" else good_draft_plan(num_seqs, k)
        plan = _without_some(plan, rng)
        for _ in range(rng.choice((0, 1, 1, 1, 2, 3))):
            plan = _changed(plan, rng)
        packed = codec.encode(plan)
        yield _with_other_bytes(packed, rng) if rng.random() < 0.25 else packed


def _without_some(plan: Any, rng: random.Random) -> Any:
    """Leave out most of what only some steps carry, or no plan would be run."""
    nothing: dict[str, Any]
    if isinstance(plan, TargetPlan):
        nothing = {
            "logit_mask": None,
            "masked_rows": None,
            "num_logprobs": None,
            "draft_step": 0,
            "num_given": plan.rows.query_lens,
        }
    else:
        nothing = {"in_table": False, "num_drawn": np.zeros_like(plan.num_drawn)}
    return dataclasses.replace(plan, **{name: value for name, value in nothing.items() if rng.random() < 0.7})


def _changed(message: Any, rng: random.Random) -> Any:
    """The message with one of its fields, at any depth, changed or left out."""
    field = rng.choice(dataclasses.fields(message))
    value = getattr(message, field.name)
    is_whole = getattr(value, "packed_whole", False)
    if dataclasses.is_dataclass(value) and (not is_whole or rng.random() < 0.97):
        return dataclasses.replace(message, **{field.name: _changed(value, rng)})
    if isinstance(value, np.ndarray):
        value = _changed_array(value, rng)
    elif isinstance(value, int):
        value = rng.choice(INTEGERS)
    else:
        value = None
    return dataclasses.replace(message, **{field.name: value})


def _changed_array(array: np.ndarray[Any, Any], rng: random.Random) -> Any:
    what = rng.random()
    if what < 0.05:
        return None
    if what < 0.12:
        return np.resize(array, rng.choice((0, 1, 2, 5, 100, 4096)))
    if what < 0.18:
        return np.resize(array, (rng.randint(0, 3), rng.randint(0, 3)))
    if what < 0.22:
        return array.reshape(-1)[0] if array.size else np.empty((0, 0, 0), array.dtype)
    changed = array.copy().reshape(-1)
    for _ in range(rng.choice((1, 1, 2, 8))):
        if changed.size:
            changed[rng.randrange(changed.size)] = _extreme(changed.dtype, rng)
    return changed.reshape(array.shape)


def _extreme(dtype: np.dtype[Any], rng: random.Random) -> Any:
    if dtype.kind == "f":
        return rng.choice(FLOATS)
    if dtype.kind == "b":
        return rng.random() < 0.5
    limits = np.iinfo(dtype)
    return rng.choice([number for number in INTEGERS if limits.min <= number <= limits.max])


def _with_other_bytes(packed: np.ndarray[Any, np.dtype[np.uint8]], rng: random.Random) -> Any:
    """Cut, lengthened, or with words of it replaced: those of the header most of all."""
    what = rng.random()
    if what < 0.15:
        return packed[: rng.randrange(len(packed))].copy()
    if what < 0.25:
        return np.concatenate([packed, np.frombuffer(rng.randbytes(rng.randint(1, 64)), np.uint8)])
    words = packed[: len(packed) // 8 * 8].copy().view(np.int64)
    header = min(len(words), 2 + 4 * int(words[1])) if rng.random() < 0.7 else len(words)
    for _ in range(rng.choice((1, 1, 2, 5))):
        words[rng.randrange(header)] = rng.choice((*INTEGERS, *range(16), rng.randint(-(2**63), 2**63 - 1)))
    return words.view(np.uint8)
