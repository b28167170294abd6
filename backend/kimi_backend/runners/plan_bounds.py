"""Bounds of a plan's step ids: they are numbers that other steps wait for, and only grow.

The runner itself checks the rest of a plan (`runners.plan_checks`).
"""

from kimi_backend.errors import InvalidRequestError
from kimi_backend.types.plan import DraftPlan, TargetPlan

LAST_STEP_ID = 2**62
"""More than microseconds since 1970, which step ids begin from (`engine.loop`)."""


def check_step_ids(plan: TargetPlan | DraftPlan) -> None:
    """Raises InvalidRequestError unless the plan's step ids can be meant."""
    if not 0 < plan.step_id <= LAST_STEP_ID:
        raise InvalidRequestError(f"plan step_id: {plan.step_id} given, 1 to {LAST_STEP_ID} allowed")
    if isinstance(plan, TargetPlan) and not 0 <= plan.draft_step < plan.step_id:
        raise InvalidRequestError(f"plan draft_step: {plan.draft_step} given, 0 to step_id - 1 allowed")
