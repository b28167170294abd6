"""A wrong plan is refused with the field, the value and what is allowed, before anything runs."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from kimi_backend.errors import ConfigError, InvalidRequestError
from kimi_backend.runners.plan_checks import PlanChecker, RunnerLimits, _expect_within
from kimi_backend.types.plan import AuxHandle, DraftPlan, RowPlan, SamplingPlan, TargetPlan
from kimi_backend.types.scoring import ScoringPlan

LIMITS = RunnerLimits(max_num_batched_tokens=24, max_num_seqs=3, max_model_len=40)
CHECKER = PlanChecker(limits=LIMITS, vocab_size=50, num_blocks=10, block_size=16)
NUM_AUX_ROWS = 14


def int32(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def scoring(rows: tuple[int, ...], token_ids: tuple[int, ...], num_top: int = 3) -> ScoringPlan:
    return ScoringPlan(rows=int32(*rows), token_ids=int32(*token_ids), num_top=num_top)


ROWS = RowPlan(
    token_ids=np.arange(14, dtype=np.int32),
    query_lens=int32(4, 10),
    seq_lens=int32(20, 33),
    block_table=np.array([[3, 9, 99999], [0, 1, 2]], np.int32),
)
TARGET_PLAN = TargetPlan.given(
    step_id=0,
    rows=ROWS,
    num_sampled_rows=int32(4, 1),
    sampling=SamplingPlan.plain(2),
    num_logprobs=None,
    wants_aux=np.array([True, False]),
)
DRAFT_PLAN = DraftPlan.given(
    step_id=0,
    rows=ROWS,
    aux=AuxHandle(tensor=torch.zeros(NUM_AUX_ROWS, 4)),
    aux_rows=np.arange(14),
    num_proposals=int32(0, 3),
    sampling=SamplingPlan.plain(1),
    output_index=np.array([34]),
)


def test_the_plans_that_the_cases_break_are_right() -> None:
    CHECKER.check_target(TARGET_PLAN)
    masks = {"logit_mask": np.zeros((2, 2), np.int32), "masked_rows": int32(0, 4)}
    CHECKER.check_target(replace(TARGET_PLAN, num_logprobs=5, **masks))
    CHECKER.check_target(replace(TARGET_PLAN, scoring=scoring((0, 13), (0, 49))))
    CHECKER.check_draft(DRAFT_PLAN, NUM_AUX_ROWS)
    one_word = SamplingPlan.plain(
        2,
        bad_word_offsets=int32(0, 0, 1),
        bad_word_token_offsets=int32(0, 2),
        bad_word_tokens=int32(4, 5),
        bias_offsets=int32(0, 1, 1),
        bias_ids=int32(7),
        bias_values=np.ones(1, np.float32),
    )
    CHECKER.check_target(replace(TARGET_PLAN, sampling=one_word))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"query_lens": int32()}, "query_lens: 0 sequences given, 1 to 3 allowed"),
        ({"query_lens": int32(1, 1, 1, 11)}, "query_lens: 4 sequences given, 1 to 3 allowed"),
        ({"query_lens": int32(0, 14)}, r"query_lens\[0\]: 0 given, 1 to 24 allowed"),
        ({"seq_lens": int32(20)}, r"seq_lens: shape \[1\] given, \[2\] allowed"),
        ({"seq_lens": int32(3, 33)}, r"seq_lens\[0\]: 3 given, 4 to 40 .* allowed"),
        ({"seq_lens": int32(20, 41)}, r"seq_lens\[1\]: 41 given, 10 to 40 .* allowed"),
        ({"token_ids": np.arange(13, dtype=np.int32)}, r"token_ids: shape \[13\] given, \[14\] allowed"),
        ({"token_ids": np.full(14, 50, np.int32)}, r"token_ids\[0\]: 50 given, 0 to 49 allowed"),
        ({"token_ids": np.full(14, -1, np.int32)}, r"token_ids\[0\]: -1 given, 0 to 49 allowed"),
        ({"block_table": np.zeros((2, 2), np.int32)}, r"block_table: shape \[2, 2\] given, \[2, at least 3\] allowed"),
        ({"block_table": np.zeros((3, 3), np.int32)}, r"block_table: shape \[3, 3\] given"),
        ({"block_table": np.array([[3, 10, 0], [0, 1, 2]], np.int32)}, r"block_table\[0, 1\]: 10 given, 0 to 9"),
        ({"block_table": np.array([[3, 9, 0], [0, 1, -1]], np.int32)}, r"block_table\[1, 2\]: -1 given, 0 to 9"),
    ],
)
def test_rows(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        CHECKER.check_target(replace(TARGET_PLAN, rows=replace(ROWS, **fields)))


def test_more_rows_than_a_step_takes() -> None:
    rows = RowPlan(
        token_ids=np.zeros(26, np.int32), query_lens=int32(13, 13), seq_lens=int32(13, 13), block_table=ROWS.block_table
    )
    plan = replace(TARGET_PLAN, rows=rows, num_sampled_rows=int32(1, 1))
    with pytest.raises(InvalidRequestError, match="token_ids: 26 rows given, at most 24"):
        CHECKER.check_target(plan)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_sampled_rows": int32(4)}, r"num_sampled_rows: shape \[1\] given, \[2\] allowed"),
        ({"num_sampled_rows": int32(5, 1)}, r"num_sampled_rows\[0\]: 5 given, 0 to 4"),
        ({"num_sampled_rows": int32(4, 9)}, r"num_sampled_rows\[1\]: 9 given, 0 to 8"),
        ({"num_sampled_rows": int32(4, -1)}, r"num_sampled_rows\[1\]: -1 given, 0 to 8"),
        ({"num_sampled_rows": int32(4, 0)}, "sampling.temperature: 2 sequences given, 1 sample"),
        ({"wants_aux": np.array([True])}, r"wants_aux: shape \[1\] given, \[2\] allowed"),
        ({"num_logprobs": -1}, "num_logprobs: -1 given, 0 to 50 allowed"),
        ({"num_logprobs": 51}, "num_logprobs: 51 given, 0 to 50 allowed"),
        ({"logit_mask": np.zeros((4, 2), np.int32)}, "masked_rows: not given, logit_mask and masked_rows go together"),
        ({"masked_rows": int32(0)}, "logit_mask: not given"),
        (
            {"logit_mask": np.zeros((4, 2), np.int32), "masked_rows": int32(0, 1, 2)},
            r"logit_mask: shape \[4, 2\] given, \[3, 2\] allowed",
        ),
        (
            {"logit_mask": np.zeros((2, 2), np.int32), "masked_rows": int32(0, 5)},
            r"masked_rows\[1\]: 5 given, 0 to 4 allowed",
        ),
        (
            {"logit_mask": np.zeros((2, 2), np.int32), "masked_rows": int32(3, 3)},
            r"masked_rows: \[3, 3\] given, rows that rise are allowed",
        ),
        ({"scoring": scoring((0, 14), (1, 2))}, r"scoring.rows\[1\]: 14 given, 0 to 13"),
        ({"scoring": scoring((3, 3), (1, 2))}, r"scoring.rows: \[3, 3\] given, rows that rise"),
        ({"scoring": scoring((), ())}, r"scoring.rows: \[\] given"),
        ({"scoring": scoring((3, 4), (1, 50))}, r"scoring.token_ids\[1\]: 50 given, 0 to 49"),
        ({"scoring": scoring((3, 4), (1,))}, r"scoring.token_ids: shape \[1\] given, \[2\] allowed"),
        ({"scoring": scoring((3, 4), (1, 2), 51)}, "scoring.num_top: 51 given, 0 to 50 allowed"),
        ({"sampling": SamplingPlan.plain(3)}, "sampling.temperature: 3 sequences given, 2 sample"),
        ({"sampling": SamplingPlan.plain(2, seed=np.zeros(1, np.int64))}, "sampling.seed: 1 sequences given, 2 sample"),
        (
            {"sampling": SamplingPlan.plain(2, ban_offsets=int32(0, 0))},
            r"sampling.ban_offsets: \[0, 0\] given, 3 offsets",
        ),
        ({"sampling": SamplingPlan.plain(2, bias_offsets=int32(0, 2, 1))}, r"sampling.bias_offsets: \[0, 2, 1\] given"),
        (
            {"sampling": SamplingPlan.plain(2, penalty_offsets=int32(0, 0, 1))},
            r"penalty_offsets: .* rise from 0 to 0, the entries of penalty_ids",
        ),
        (
            {
                "sampling": SamplingPlan.plain(
                    2, bias_offsets=int32(0, 0, 1), bias_ids=int32(50), bias_values=np.ones(1, np.float32)
                )
            },
            r"sampling.bias_ids\[0\]: 50 given, 0 to 49 allowed",
        ),
        (
            {"sampling": SamplingPlan.plain(2, bad_word_offsets=int32(0, 0, 1))},
            "sampling.bad_word_offsets: .* entries of bad_word_token_offsets",
        ),
    ],
)
def test_what_a_target_step_samples(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        CHECKER.check_target(replace(TARGET_PLAN, **fields))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_proposals": int32(3)}, r"num_proposals: shape \[1\] given, \[2\] allowed"),
        ({"num_proposals": int32(0, 8)}, r"num_proposals\[1\]: 8 given, 0 to 7 allowed"),
        ({"aux_rows": np.arange(13)}, r"aux_rows: shape \[13\] given, \[14\] allowed"),
        ({"aux_rows": np.arange(1, 15)}, r"aux_rows\[13\]: 14 given, 0 to 13 allowed"),
        ({"output_index": np.array([33])}, r"output_index\[0\]: 33 given, at least 34 \(seq_len \+ 1\) is allowed"),
        ({"sampling": SamplingPlan.plain(2)}, "sampling.temperature: 2 sequences given, 1 sample"),
        ({"rows": replace(ROWS, seq_lens=int32(20, 39))}, r"slots needed .*\[1\]: 41 given, 1 to 40"),
        ({"rows": replace(ROWS, block_table=ROWS.block_table[:, :2])}, r"block_table: shape \[2, 2\] given"),
    ],
)
def test_what_a_draft_step_proposes(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        CHECKER.check_draft(replace(DRAFT_PLAN, **fields), NUM_AUX_ROWS)


def test_blocks_of_provisional_rows_are_checked_too() -> None:
    rows = replace(ROWS, seq_lens=int32(20, 31))
    plan = replace(DRAFT_PLAN, rows=rows, output_index=np.array([32]))
    CHECKER.check_draft(plan, NUM_AUX_ROWS)
    broken = replace(rows, block_table=np.array([[3, 9, 0], [0, 1, 77]], np.int32))
    with pytest.raises(InvalidRequestError, match=r"block_table\[1, 2\]: 77 given"):
        CHECKER.check_draft(replace(plan, rows=broken), NUM_AUX_ROWS)


def test_a_model_shorter_than_max_model_len() -> None:
    with pytest.raises(ConfigError, match="max_model_len: 40 given, at most 39"):
        LIMITS.check_positions(39)


@pytest.mark.parametrize("count", [5, 32, 33, 100])
@pytest.mark.parametrize("has_bounds_of_its_own", [False, True])
def test_a_number_out_of_bounds_is_found_in_few_and_in_many(count: int, has_bounds_of_its_own: bool) -> None:
    values = np.arange(count, dtype=np.int64)
    low, high = (values, values + 2) if has_bounds_of_its_own else (0, count - 1)
    _expect_within("rows", values, low, high)
    least, most = (count - 1, count + 1) if has_bounds_of_its_own else (0, count - 1)
    for wrong in (least - 1, most + 1):
        given = values.copy()
        given[-1] = wrong
        with pytest.raises(InvalidRequestError) as error:
            _expect_within("rows", given, low, high, "of all")
        assert str(error.value) == f"plan rows[{count - 1}]: {wrong} given, {least} to {most} (of all) allowed"


@pytest.mark.parametrize(
    ("name", "array", "message"),
    [
        ("temperature", np.ones((1, 1), np.float32), "plan sampling.temperature: 2 dimensions given, 1 allowed"),
        ("history_tail", np.ones(1, np.int32), "plan sampling.history_tail: 1 dimensions given, 2 allowed"),
    ],
)
def test_sampling_arrays_have_their_dimensions(name: str, array: np.ndarray, message: str) -> None:
    wrong = replace(DRAFT_PLAN, sampling=replace(DRAFT_PLAN.sampling, **{name: array}))
    with pytest.raises(InvalidRequestError, match=message):
        CHECKER.check_draft(wrong, NUM_AUX_ROWS)
