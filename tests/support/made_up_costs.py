"""Step costs that nobody has measured."""

from kimi_backend.types.step_costs import StepCosts

SIZES, QUERY_LENS = (1, 4, 16, 64), (1, 2, 4, 8)


def linear_costs(base_us: float, row_us: float, proposal_us: float = 0.0, *, is_captured: bool = False) -> StepCosts:
    """A base, and so much a row; of a draft, so much a proposal and sequence, and a base of all but the first."""
    steps = tuple(tuple(base_us + row_us * size * length for length in QUERY_LENS) for size in SIZES)
    proposals = tuple(tuple(k * proposal_us * size + (k - 1) * base_us for k in range(1, 8)) for size in SIZES)
    return StepCosts(
        num_seqs=SIZES,
        query_lens=QUERY_LENS,
        is_captured=is_captured,
        context_len=64,
        step_us=steps,
        padded_us=steps,
        context_us=(0.0,) * len(SIZES),
        row_context_us=(0.0,) * len(SIZES),
        proposals_us=proposals if proposal_us else (),
    )
