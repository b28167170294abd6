"""Log-probabilities of raw logits: float64 inside, float32 out."""

import torch
from torch import Tensor


def row_logprobs(raw: Tensor, column: Tensor, num_logprobs: int) -> tuple[Tensor, Tensor, Tensor]:
    """Log-softmax of each row at the drawn column and at the most likely ones.

    Args:
        raw: [R, C] float32, columns by ascending token id. column: [R] int64.
    Returns:
        drawn [R] float32, top [R, num_logprobs] float32, top columns [R, num_logprobs] int64, best first, the lowest
        id first among equals.
    """
    if not 0 <= num_logprobs <= raw.shape[1]:
        raise ValueError(f"num_logprobs is {num_logprobs}; must be from 0 to the {raw.shape[1]} columns of the logits")
    values = raw.to(torch.float64)
    log_total = values.logsumexp(dim=1)
    drawn = values.gather(1, column[:, None])[:, 0] - log_total
    ordered, columns = raw.sort(dim=1, descending=True, stable=True)
    top = ordered[:, :num_logprobs].to(torch.float64) - log_total[:, None]
    return drawn.to(torch.float32), top.to(torch.float32), columns[:, :num_logprobs].contiguous()
