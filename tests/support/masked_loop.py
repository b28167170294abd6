"""A loop whose verifies mask some of their rows, others in every step, and none in every third."""

from dataclasses import replace

import numpy as np

from kimi_backend.types.plan import TargetPlan
from support.speculative_loop import SpeculativeLoop


class MaskedLoop(SpeculativeLoop):
    """Masks follow from the step alone, so two loops have the same ones."""

    def _target_plan(self, rows: list[list[int]]) -> TargetPlan:
        plan = super()._target_plan(rows)
        draw = np.random.default_rng(plan.step_id)
        masked = np.flatnonzero(draw.random(int(plan.num_sampled_rows.sum())) < 0.6).astype(np.int32)
        if plan.step_id % 3 == 0 or not len(masked):
            return plan
        num_words = -(-self._target.describe().vocab_size // 32)
        masks = draw.integers(-(2**31), 2**31, (len(masked), num_words), np.int32)
        return replace(plan, logit_mask=masks, masked_rows=masked)
