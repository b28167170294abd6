"""Pearson's test of draws of two tokens against their joint distribution."""

import numpy as np
import numpy.typing as npt
import torch


def chi_square_p_value(pairs: npt.NDArray[np.int64], probabilities: npt.NDArray[np.float64]) -> float:
    """The probability of draws at least so far from what was expected; rare pairs are pooled until each cell expects at
    least 5. 0 where a pair was drawn that has no probability.

    Args:
        pairs: [N, 2] tokens. probabilities: [V, V] of the first and the second.
    """
    vocab_size = len(probabilities)
    expected = probabilities.ravel() * len(pairs)
    observed = np.bincount(pairs[:, 0] * vocab_size + pairs[:, 1], minlength=vocab_size**2).astype(np.float64)
    if observed[expected == 0].sum() > 0:
        return 0.0
    order = np.argsort(expected)
    pooled = int((np.cumsum(expected[order]) < 5).sum()) + 1
    while expected[order[pooled]] < 5:
        pooled += 1
    cells = [(observed[order[:pooled]].sum(), expected[order[:pooled]].sum())]
    cells += list(zip(observed[order[pooled:]], expected[order[pooled:]], strict=True))
    assert min(e for _, e in cells) >= 5
    statistic = sum((o - e) ** 2 / e for o, e in cells)
    half = torch.tensor([(len(cells) - 1) / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))
