"""`sample_tokens` and `verify_draft_tokens` in Triton-language.

Which arrays of `SamplingInputs` are empty decides whether rows are copied for processors, so a CUDA graph must be
captured with arrays that are as empty, or not, as those it is replayed with.
"""

import torch
import triton
from torch import Tensor

from kimi_kernels.sampling.kernel_launch import SamplingCall
from kimi_kernels.sampling.kernel_mask import mask_in_place
from kimi_kernels.sampling.kernel_verify import verify_kernel
from kimi_kernels.sampling.logprobs import with_logprobs
from kimi_kernels.sampling.op import check_mask, check_sample, check_verify
from kimi_kernels.sampling.processors import ColumnOrder
from kimi_kernels.sampling_inputs import SampleOutput, SamplingInputs, SamplingRows, VerifyOutput, VocabularyMap

VERIFY_SEQUENCES = 8
"""Sequences a program of the verify kernel."""


def sample_tokens(
    logits: Tensor,
    inputs: SamplingInputs,
    rows: SamplingRows,
    vocabulary_map: VocabularyMap | None = None,
    num_logprobs: int | None = None,
) -> SampleOutput:
    """`SampleTokens`."""
    check_sample(logits, rows, vocabulary_map)
    if not len(logits):
        empty = torch.empty(0, dtype=torch.int64, device=logits.device)
        return SampleOutput(token_ids=empty, status=empty.to(torch.int32))
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    call = SamplingCall(logits, inputs, rows, vocabulary_map)
    call.process()
    call.draw()
    call.check()
    call.select()
    draws = SampleOutput(token_ids=call.token_ids, status=call.status)
    if num_logprobs is None:
        return draws
    # Rare, so in torch; nothing here waits for the device.
    order = ColumnOrder.from_map(vocabulary_map)
    raw = logits.float() if order.source_column is None else logits.float()[:, order.source_column]
    return with_logprobs(draws, raw, order.columns(draws.token_ids).clamp(min=0), num_logprobs, order)


def mask_logits(logits: Tensor, logit_mask: Tensor, mask_of_row: Tensor) -> None:
    """`MaskLogits`."""
    check_mask(logits, logit_mask, mask_of_row)
    if len(logits):
        mask_in_place(logits, logit_mask, mask_of_row, keeps_bad=True)


def verify_draft_tokens(
    token_ids: Tensor,
    status: Tensor,
    first_row: Tensor,
    draft_token_ids: Tensor,
    num_draft_tokens: Tensor,
) -> VerifyOutput:
    """`VerifyDraftTokens`."""
    check_verify(token_ids, status, first_row, draft_token_ids, num_draft_tokens)
    num_seqs, width = draft_token_ids.shape
    device = token_ids.device
    result = VerifyOutput(
        output_token_ids=torch.empty(num_seqs, width + 1, dtype=torch.int64, device=device),
        num_accepted_tokens=torch.empty(num_seqs, dtype=torch.int32, device=device),
        last_row=torch.empty(num_seqs, dtype=torch.int64, device=device),
        status=torch.empty(num_seqs, dtype=torch.int32, device=device),
    )
    if num_seqs == 0:
        return result
    verify_kernel[(triton.cdiv(num_seqs, VERIFY_SEQUENCES),)](
        token_ids, status, first_row, draft_token_ids, num_draft_tokens, result.output_token_ids,
        result.num_accepted_tokens, result.last_row, result.status, num_seqs, width, draft_token_ids.stride(0),
        SEQS=VERIFY_SEQUENCES, WIDTH_P2=triton.next_power_of_2(width + 1), num_warps=1,
    )  # fmt: skip
    return result
