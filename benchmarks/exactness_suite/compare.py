"""Two passes over the same text: the share of equal tokens, and how close each other decision was."""

from typing import Any

import numpy as np
import numpy.typing as npt

from exactness_suite.teacher_forced import Pass

NOISE_FACTOR = 4.0
"""A difference is rounding where the gap is below this many times the 99th percentile of what rounding does."""
PERCENTILE = 99.0


def compare(plain: Pass, windowed: Pass) -> dict[str, Any]:
    """Rounding is measured at the positions that agree: how far the two gaps moved from one pass to the other.

    The first token is left out: both passes draw it from the same step over the prompt.
    """
    plain, windowed = _later(plain), _later(windowed)
    is_equal = plain.token_ids == windowed.token_ids
    score_noise = _noise(plain.score_gaps, windowed.score_gaps, is_equal)
    router_noise = _noise(plain.router_gaps, windowed.router_gaps, is_equal)
    differences = []
    for prompt, index in np.argwhere(~is_equal).tolist():
        score_gap, router_gap = float(plain.score_gaps[prompt, index]), float(plain.router_gaps[prompt, index])
        differences.append(
            {
                "prompt": prompt,
                "index": index + 1,
                "token_id": int(plain.token_ids[prompt, index]),
                "windowed_token_id": int(windowed.token_ids[prompt, index]),
                "score_gap": score_gap,
                "router_gap": router_gap,
                "is_rounding": score_gap < NOISE_FACTOR * score_noise or router_gap < NOISE_FACTOR * router_noise,
                "by_score": score_gap < NOISE_FACTOR * score_noise,
            }
        )
    return {
        "positions": int(is_equal.size),
        "same_share": float(is_equal.mean()),
        "score_noise_p99": score_noise,
        "router_noise_p99": router_noise,
        "score_gap_median": float(np.median(plain.score_gaps)),
        "router_gap_median": float(np.median(plain.router_gaps)),
        "share_below_router_noise": float((plain.router_gaps < NOISE_FACTOR * router_noise).mean()),
        "share_below_score_noise": float((plain.score_gaps < NOISE_FACTOR * score_noise).mean()),
        "unexplained": sum(not difference["is_rounding"] for difference in differences),
        "differences": differences,
    }


def _later(of: Pass) -> Pass:
    return Pass(of.token_ids[:, 1:], of.score_gaps[:, 1:], of.router_gaps[:, 1:])


def _noise(plain: npt.NDArray[np.float64], windowed: npt.NDArray[np.float64], is_equal: npt.NDArray[np.bool_]) -> float:
    """0 where nothing agrees: then nothing is rounding."""
    moved = np.abs(plain - windowed)[is_equal]
    return float(np.percentile(moved, PERCENTILE)) if moved.size else 0.0
