# mypy: disallow-untyped-defs=False, disallow-untyped-calls=False
# mypy: disallow-untyped-decorators=False, disallow-incomplete-defs=False
"""Accept draft tokens while they equal what the target drew: one small program a few sequences."""

import triton
import triton.language as tl

from kimi_kernels.sampling_inputs import PLACEHOLDER_TOKEN_ID, STATUS_OK

PLACEHOLDER = tl.constexpr(PLACEHOLDER_TOKEN_ID)
OK = tl.constexpr(STATUS_OK)


@triton.jit(do_not_specialize=["num_seqs", "width", "draft_stride"])
def verify_kernel(
    TOKEN_IDS,
    STATUS,
    FIRST_ROW,
    DRAFT_TOKEN_IDS,
    NUM_DRAFT_TOKENS,
    OUTPUT_TOKEN_IDS,
    NUM_ACCEPTED,
    LAST_ROW,
    OUT_STATUS,
    num_seqs,
    width,
    draft_stride,
    SEQS: tl.constexpr,
    WIDTH_P2: tl.constexpr,
):
    """SEQS sequences.

    Args:
        TOKEN_IDS: [R] int64, STATUS: [R] int32. FIRST_ROW: [B] int64. DRAFT_TOKEN_IDS: [B, width] int32.
        NUM_DRAFT_TOKENS: [B] int32. OUTPUT_TOKEN_IDS: [B, width + 1] int64. NUM_ACCEPTED: [B] int32.
        LAST_ROW: [B] int64. OUT_STATUS: [B] int32.
    """
    seq = tl.program_id(0) * SEQS + tl.arange(0, SEQS)
    is_seq = seq < num_seqs
    first = tl.load(FIRST_ROW + seq, mask=is_seq, other=0)
    num_draft = tl.load(NUM_DRAFT_TOKENS + seq, mask=is_seq, other=0)
    place = tl.arange(0, WIDTH_P2)[None, :]
    is_row = is_seq[:, None] & (place <= num_draft[:, None]) & (place <= width)
    drawn = tl.load(TOKEN_IDS + first[:, None] + place, mask=is_row, other=PLACEHOLDER)
    status = tl.load(STATUS + first[:, None] + place, mask=is_row, other=OK)
    is_draft = is_seq[:, None] & (place < num_draft[:, None])
    draft = tl.load(DRAFT_TOKEN_IDS + seq[:, None] * draft_stride + place, mask=is_draft, other=PLACEHOLDER)
    is_match = is_draft & (drawn == draft.to(tl.int64)) & (status == OK)
    # The first place that does not match, which exists: the place after the last draft token never matches.
    num_accepted = tl.min(tl.where(is_match, WIDTH_P2, place), 1)
    is_used = place <= num_accepted[:, None]
    out = OUTPUT_TOKEN_IDS + seq[:, None] * (width + 1) + place
    tl.store(out, tl.where(is_used, drawn, PLACEHOLDER), mask=is_seq[:, None] & (place <= width))
    is_last = place == num_accepted[:, None]
    tl.store(NUM_ACCEPTED + seq, num_accepted, mask=is_seq)
    tl.store(LAST_ROW + seq, first + num_accepted, mask=is_seq)
    tl.store(OUT_STATUS + seq, tl.sum(tl.where(is_last, status, 0), 1), mask=is_seq)
