"""Log-probabilities of raw logits: float64 inside, float32 out."""

from dataclasses import replace

import torch
from torch import Tensor

from kimi_kernels.sampling.processors import ColumnOrder
from kimi_kernels.sampling_inputs import SampleOutput


def with_logprobs(
    draws: SampleOutput, raw: Tensor, column: Tensor, num_logprobs: int, order: ColumnOrder
) -> SampleOutput:
    """The draws with their log-probabilities and the most likely tokens; raw and column as in `row_logprobs`."""
    drawn, top, columns = row_logprobs(raw, column, num_logprobs)
    token_ids = columns if order.token_ids is None else order.token_ids[columns]
    return replace(draws, logprobs=drawn, top_logprob_ids=token_ids, top_logprobs=top)


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
    columns = most_likely(raw, num_logprobs)
    top = values.gather(1, columns) - log_total[:, None]
    return drawn.to(torch.float32), top.to(torch.float32), columns


def most_likely(raw: Tensor, count: int) -> Tensor:
    """[R, count] int64: columns of the largest values, best first, the lowest column first among equals.

    A key of value and column has no equals, so that a selection can take the place of sorting all columns.
    """
    if count == 0:
        return raw.new_empty(len(raw), 0, dtype=torch.int64)
    bits = (raw + 0.0).view(torch.int32)  # -0.0 equals 0.0
    ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(torch.int64)  # as integers, in the order of the values
    behind = raw.shape[1] - 1 - torch.arange(raw.shape[1], device=raw.device)
    return raw.shape[1] - 1 - (ordered * 2**32 + behind).topk(count, dim=1).values % 2**32
