"""Step ids are numbers that other steps wait for: none may be below what was, or so large that none can follow."""

from dataclasses import replace

import numpy as np
import pytest

from kimi_backend.errors import InvalidRequestError
from kimi_backend.runners.plan_bounds import check_step_ids
from kimi_backend.runners.step_timing import draft_plan, target_plan
from kimi_backend.types.plan import AuxHandle, RowPlan

ONE = np.ones(1, np.int32)
ROWS = RowPlan(token_ids=ONE, query_lens=ONE, seq_lens=ONE, block_table=np.zeros((1, 1), np.int32))
TARGET, DRAFT = target_plan(ROWS, wants_aux=False), draft_plan(ROWS, 0, AuxHandle(), in_table=False)


@pytest.mark.parametrize(
    ("step_id", "is_allowed"), [(-1, False), (0, False), (1, True), (2**62, True), (2**62 + 1, False)]
)
def test_a_step_id_is_from_1_to_2_to_the_62(step_id: int, is_allowed: bool) -> None:
    for plan in (TARGET, DRAFT):
        if is_allowed:
            check_step_ids(replace(plan, step_id=step_id))
            continue
        with pytest.raises(InvalidRequestError, match=f"plan step_id: {step_id} given, 1 to {2**62} allowed"):
            check_step_ids(replace(plan, step_id=step_id))


@pytest.mark.parametrize(("draft_step", "is_allowed"), [(-1, False), (0, True), (4, True), (5, False)])
def test_a_verify_reads_what_an_earlier_step_proposed(draft_step: int, is_allowed: bool) -> None:
    plan = replace(TARGET, step_id=5, draft_step=draft_step)
    if is_allowed:
        check_step_ids(plan)
        return
    with pytest.raises(InvalidRequestError, match=f"plan draft_step: {draft_step} given, 0 to step_id - 1 allowed"):
        check_step_ids(plan)
