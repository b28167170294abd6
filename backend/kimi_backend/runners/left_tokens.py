"""Draft tokens that a draft leaves on the device and a target reads there, neither of them by way of the host.

They lie in an int32 array [1 + longest proposal, sequences] (`types.plan.TokenHandle`): status first, tokens below. The
target copies it before it reads, because it reads twice: as input of the rows, and to compare with what it drew. If a
draft that was killed or runs late changes the array meanwhile, the guesses are bad and the text is still the target's.
"""

import numpy as np
import torch

from kimi_backend.errors import InvalidRequestError
from kimi_backend.runners.plan_checks import RunnerLimits
from kimi_backend.types.plan import PLACEHOLDER_TOKEN_ID, Int64Array, TargetPlan


def left_shape(limits: RunnerLimits) -> tuple[int, int]:
    """Of the array of a runner with these limits."""
    return 1 + limits.max_speculative_tokens, limits.max_num_seqs


def resolve_left(plan: TargetPlan, device: torch.device) -> torch.Tensor | None:
    """The array that a checked plan names, on this device; None where it names none.

    Raises:
        InvalidRequestError: it is no such array, or too small.
    """
    handle = plan.draft_tokens
    if not handle.num_seqs:
        return None
    left, rows = handle.tensor, int(plan.num_sampled_rows.max())
    if (
        not isinstance(left, torch.Tensor)
        or left.dtype != torch.int32
        or left.ndim != 2
        or left.shape[0] < rows
        or left.shape[1] < handle.num_seqs
    ):
        given = f"{left.dtype} {list(left.shape)}" if isinstance(left, torch.Tensor) else type(left).__name__
        raise InvalidRequestError(
            f"plan draft_tokens.tensor: {given} given, torch.int32 of at least [{rows}, {handle.num_seqs}] is needed"
        )
    return left.to(device)


def left_places(plan: TargetPlan, num_columns: int) -> Int64Array:
    """[T] place of each row's token in the flattened array; -1 where the plan has the token.

    Args:
        num_columns: of the array.
    """
    assert plan.draft_columns is not None
    ends = np.cumsum(plan.rows.query_lens, dtype=np.int64)
    sequence = np.repeat(np.arange(len(ends)), plan.rows.query_lens)
    place = np.arange(len(sequence)) - (ends - plan.num_sampled_rows)[sequence]
    column = plan.draft_columns[sequence].astype(np.int64)
    return np.where((place > 0) & (column >= 0), place * num_columns + column, -1)


def window_rows(plan: TargetPlan, width: int) -> Int64Array:
    """[B, width] row of the step that embeds each draft token under verification; -1 after a sequence's last."""
    counts = plan.num_sampled_rows[plan.num_sampled_rows > 0]
    ends = np.cumsum(plan.rows.query_lens, dtype=np.int64)[plan.num_sampled_rows > 0]
    columns = np.arange(width)
    return np.where(columns < (counts - 1)[:, None], (ends - counts + 1)[:, None] + columns, -1)


def take_left(given: torch.Tensor, left: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """`given`, with what `left` has at `places` where these are not negative.

    Args:
        given, places: of one shape, an integer type and int64.
        left: the array.
    """
    found = left.reshape(-1)[places.clamp(min=0)]
    return torch.where(places < 0, given, found.to(given.dtype))


def as_input(token_ids: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Ids that can be embedded: a placeholder becomes any token, because nobody will accept what follows it."""
    assert PLACEHOLDER_TOKEN_ID < 0
    return token_ids.clamp(0, vocab_size - 1)
