"""Bounds of what a plan says of other steps: these numbers size arrays and name steps to wait for.

The runner itself checks the rest of a plan (`runners.plan_checks`).
"""

from kimi_backend.errors import InvalidRequestError
from kimi_backend.types.plan import TargetPlan


def check_hand_over(plan: TargetPlan, max_num_seqs: int) -> None:
    """Raises InvalidRequestError unless what the plan says of the draft's step can be meant.

    Args:
        max_num_seqs: most sequences in a step of the draft.
    """
    num_seqs = plan.draft_tokens.num_seqs
    if not 0 <= num_seqs <= max_num_seqs:
        raise InvalidRequestError(f"plan draft_tokens.num_seqs: {num_seqs} given, 0 to {max_num_seqs} allowed")
    for name, number in (("draft_step", plan.draft_step), ("stamp", plan.stamp)):
        if number < 0:
            raise InvalidRequestError(f"plan {name}: {number} given, 0 or more allowed")
