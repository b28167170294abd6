# mypy: disallow-untyped-defs=False, disallow-untyped-calls=False
# mypy: disallow-untyped-decorators=False, disallow-incomplete-defs=False
"""The ops on the token table, one small launch each. BLOCK rows or sequences a program: a step has few."""

from collections.abc import Mapping

import triton
import triton.language as tl
from torch import Tensor

from kimi_kernels.sampling_inputs import PLACEHOLDER_TOKEN_ID, STATUS_NOT_FINITE
from kimi_kernels.token_table.op import check_output_token_ids, check_window

PLACEHOLDER = tl.constexpr(PLACEHOLDER_TOKEN_ID)
NOT_FINITE = tl.constexpr(STATUS_NOT_FINITE)
BLOCK = 64
READ_TOKENS = ("token_ids", "sequence", "cu_seqlens", "num_given", "table_rows", "num_draft_tokens", "stamp")
READ_DRAWN = ("token_ids", "sequence", "cu_seqlens", "num_drawn", "table_rows", "last_rows")
GIVEN = ("first_len", "first_index", "most", "room", "num_drawn", "table_rows")
WORKED_OUT = ("token_index", "is_wanted", "counts", "seq_lens", "positions", "slots")


@triton.jit(
    do_not_specialize=["num_rows", "num_seqs", "window_stride", "drawn_stride", "proposed_stride", "vocab_size"],
    do_not_specialize_on_alignment=[
        "token_ids", "sequence", "cu_seqlens", "num_given", "table_rows", "num_draft_tokens", "stamp", "embedded",
        "window", "draft_status",
    ],
)  # fmt: skip
def read_tokens_kernel(
    token_ids,  # [T] int32
    sequence,  # [T] int64
    cu_seqlens,  # [B + 1] int32
    num_given,  # [B] int32
    table_rows,  # [B] int64
    num_draft_tokens,  # [B] int32
    stamp,  # [1] int32
    drawn,  # [rows, drawn_stride] int32
    proposed,  # [rows, proposed_stride] int32
    embedded,  # [T] int32
    window,  # [B, WIDTH] int32, last dimension contiguous
    draft_status,  # [B] int32
    num_rows,
    num_seqs,
    window_stride,
    drawn_stride,
    proposed_stride,
    vocab_size,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """BLOCK rows and BLOCK sequences."""
    asked_for = tl.load(stamp)
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_row = index < num_rows
    seq = tl.load(sequence + index, mask=is_row, other=0)
    start, end = tl.load(cu_seqlens + seq), tl.load(cu_seqlens + seq + 1)
    table_row = tl.load(table_rows + seq)
    is_row_of_seq = is_row & (index < end)
    place = index - (end - 1 - tl.load(num_draft_tokens + seq))
    is_given = index - start < tl.load(num_given + seq)
    given = tl.load(token_ids + index, mask=is_row_of_seq & is_given, other=PLACEHOLDER)
    is_last = is_row_of_seq & (place == 0)
    count = tl.load(drawn + table_row * drawn_stride, mask=is_last, other=0)
    count = tl.minimum(tl.maximum(count, 0), drawn_stride - 2)
    last = tl.load(drawn + table_row * drawn_stride + 1 + count, mask=is_last, other=PLACEHOLDER)
    is_theirs = is_row_of_seq & (place > 0) & (place <= proposed_stride - 2)
    is_theirs &= tl.load(proposed + table_row * proposed_stride) == asked_for
    theirs = tl.load(proposed + table_row * proposed_stride + 1 + place, mask=is_theirs, other=PLACEHOLDER)
    token = tl.where(is_given, given, tl.where(place == 0, last, theirs))
    token = tl.minimum(tl.maximum(token, 0), vocab_size - 1)
    tl.store(embedded + index, tl.where(is_row_of_seq, token, 0), mask=is_row)

    is_seq = index < num_seqs
    start = tl.load(cu_seqlens + index, mask=is_seq, other=0)
    end = tl.load(cu_seqlens + index + 1, mask=is_seq, other=0)
    table_row = tl.load(table_rows + index, mask=is_seq, other=0)
    is_asked_for = is_seq & (tl.load(proposed + table_row * proposed_stride) == asked_for)
    status = tl.load(proposed + table_row * proposed_stride + 1, mask=is_asked_for, other=NOT_FINITE)
    tl.store(draft_status + index, status, mask=is_seq)
    num_drafts = tl.load(num_draft_tokens + index, mask=is_seq, other=0)
    num_in_plan = tl.load(num_given + index, mask=is_seq, other=0)
    for draft in tl.static_range(WIDTH):
        row = end - num_drafts + draft
        is_draft = is_seq & (draft < num_drafts)
        is_given = row - start < num_in_plan
        given = tl.load(token_ids + row, mask=is_draft & is_given, other=PLACEHOLDER)
        is_theirs = is_draft & is_asked_for & (draft < proposed_stride - 2)
        theirs = tl.load(proposed + table_row * proposed_stride + 2 + draft, mask=is_theirs, other=PLACEHOLDER)
        tl.store(window + index * window_stride + draft, tl.where(is_given, given, theirs), mask=is_seq)


@triton.jit(
    do_not_specialize=["num_seqs", "width", "drawn_stride"],
    do_not_specialize_on_alignment=["output_token_ids", "accepted", "table_rows"],
)
def store_drawn_kernel(
    output_token_ids,  # [B, width] int64
    accepted,  # [B] int32
    table_rows,  # [B] int64
    drawn,  # [rows, drawn_stride] int32
    num_seqs,
    width,
    drawn_stride,
    BLOCK: tl.constexpr,
):
    """BLOCK sequences."""
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_seq = index < num_seqs
    row = drawn + tl.load(table_rows + index, mask=is_seq, other=0) * drawn_stride
    tl.store(row, tl.load(accepted + index, mask=is_seq, other=0), mask=is_seq)
    for place in range(width):
        token = tl.load(output_token_ids + index * width + place, mask=is_seq, other=0)
        tl.store(row + 1 + place, token.to(tl.int32), mask=is_seq)


@triton.jit
def _num_accepted(num_drawn, table_row, drawn, drawn_stride, is_seq):
    """Accepted draft tokens, never more than were verified."""
    most = tl.maximum(num_drawn - 1, 0)
    return tl.minimum(tl.maximum(tl.load(drawn + table_row * drawn_stride, mask=is_seq, other=0), 0), most)


@triton.jit(
    do_not_specialize=["num_rows", "num_seqs", "drawn_stride", "vocab_size"],
    do_not_specialize_on_alignment=["token_ids", "sequence", "cu_seqlens", "num_drawn", "table_rows", "last_rows"],
)
def read_drawn_kernel(
    token_ids,  # [T] int32
    sequence,  # [T] int64
    cu_seqlens,  # [B + 1] int32
    num_drawn,  # [B] int32
    table_rows,  # [B] int64
    last_rows,  # [B] int64
    drawn,  # [rows, drawn_stride] int32
    num_rows,
    num_seqs,
    drawn_stride,
    vocab_size,
    BLOCK: tl.constexpr,
):
    """BLOCK rows and BLOCK sequences."""
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_row = index < num_rows
    seq = tl.load(sequence + index, mask=is_row, other=0)
    end = tl.load(cu_seqlens + seq + 1)
    place = index - (end - tl.load(num_drawn + seq))
    is_drawn = is_row & (place >= 0) & (index < end) & (place < drawn_stride - 1)
    token = tl.load(drawn + tl.load(table_rows + seq) * drawn_stride + 1 + place, mask=is_drawn, other=0)
    tl.store(token_ids + index, tl.minimum(tl.maximum(token, 0), vocab_size - 1), mask=is_drawn)

    is_seq = index < num_seqs
    start = tl.load(cu_seqlens + index, mask=is_seq, other=0)
    end = tl.load(cu_seqlens + index + 1, mask=is_seq, other=0)
    count = tl.load(num_drawn + index, mask=is_seq, other=0)
    table_row = tl.load(table_rows + index, mask=is_seq, other=0)
    last = end - 1 - tl.maximum(count - 1, 0) + _num_accepted(count, table_row, drawn, drawn_stride, is_seq)
    tl.store(last_rows + index, tl.where(end > start, last, 0).to(tl.int64), mask=is_seq)


@triton.jit(
    do_not_specialize=["num_seqs", "table_stride", "drawn_stride", "block_size"],
    do_not_specialize_on_alignment=[
        "first_len", "first_index", "most", "room", "num_drawn", "table_rows", "token_index", "is_wanted", "counts",
        "seq_lens", "positions", "slots",
    ],
)  # fmt: skip
def plan_steps_kernel(
    first_len,  # [B] int64, and so on to room
    first_index,
    most,
    room,
    num_drawn,  # [B] int32
    table_rows,  # [B] int64
    token_index,  # [k, B] int64
    is_wanted,  # [k, B] int32
    counts,  # [k, B] int32
    seq_lens,  # [k - 1, B] int32
    positions,  # [k - 1, B] int64
    slots,  # [k - 1, B] int64
    table,  # [B, table_stride] int32
    drawn,  # [rows, drawn_stride] int32
    num_seqs,
    table_stride,
    drawn_stride,
    block_size,
    DRAWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """BLOCK sequences."""
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_seq = index < num_seqs
    table_row = tl.load(table_rows + index, mask=is_seq, other=0)
    count = tl.load(num_drawn + index, mask=is_seq, other=0)
    num_accepted = _num_accepted(count, table_row, drawn, drawn_stride, is_seq).to(tl.int64)
    length = tl.load(first_len + index, mask=is_seq, other=0)
    live = (length > 0).to(tl.int64)
    length += num_accepted
    first = tl.load(first_index + index, mask=is_seq, other=0) + num_accepted
    wanted = tl.minimum(
        tl.load(room + index, mask=is_seq, other=0) - num_accepted, tl.load(most + index, mask=is_seq, other=0)
    )
    wanted = tl.maximum(wanted, 0) * live
    for draw in tl.static_range(DRAWS):
        place = draw * num_seqs + index
        tl.store(token_index + place, (first + draw) * live, mask=is_seq)
        tl.store(is_wanted + place, (wanted > draw).to(tl.int32), mask=is_seq)
        tl.store(counts + place, ((tl.maximum(wanted, 1) > draw).to(tl.int64) * live).to(tl.int32), mask=is_seq)
        if draw:
            place -= num_seqs
            seq_len = (length + tl.minimum(tl.maximum(wanted - 1, 0), draw)) * live
            position = tl.maximum(seq_len - 1, 0)
            block = tl.load(table + index.to(tl.int64) * table_stride + position // block_size, mask=is_seq, other=0)
            slot = block.to(tl.int64) * block_size + position % block_size
            tl.store(seq_lens + place, seq_len.to(tl.int32), mask=is_seq)
            tl.store(positions + place, position, mask=is_seq)
            tl.store(slots + place, tl.where(wanted > draw, slot, -1), mask=is_seq)


@triton.jit(
    do_not_specialize=["num_seqs", "proposed_stride"],
    do_not_specialize_on_alignment=["token_ids", "status", "is_wanted", "counts", "table_rows", "stamp"],
)
def store_proposals_kernel(
    token_ids,  # [k, B] int64
    status,  # [k, B] int32
    is_wanted,  # [k, B] int32
    counts,  # [k, B] int32
    table_rows,  # [B] int64
    stamp,  # [1] int32
    proposed,  # [rows, proposed_stride] int32
    num_seqs,
    proposed_stride,
    DRAWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """BLOCK sequences."""
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_seq = index < num_seqs
    row = proposed + tl.load(table_rows + index, mask=is_seq, other=0) * proposed_stride
    failed = tl.zeros([BLOCK], tl.int32)
    for draw in tl.static_range(DRAWS):
        place = draw * num_seqs + index
        counted = tl.load(status + place, mask=is_seq, other=0) * tl.load(counts + place, mask=is_seq, other=0)
        failed = tl.maximum(failed, counted)
    tl.store(row, tl.load(stamp), mask=is_seq)
    tl.store(row + 1, failed, mask=is_seq)
    for draw in tl.static_range(DRAWS):
        place = draw * num_seqs + index
        token = tl.load(token_ids + place, mask=is_seq, other=0).to(tl.int32)
        is_kept = (tl.load(is_wanted + place, mask=is_seq, other=0) > 0) & (failed == 0)
        tl.store(row + 2 + draw, tl.where(is_kept, token, PLACEHOLDER), mask=is_seq)


def read_tokens(
    step: Mapping[str, Tensor],
    drawn: Tensor,
    proposed: Tensor,
    token_ids: Tensor,
    window: Tensor,
    draft_status: Tensor,
    *,
    vocab_size: int,
) -> None:
    num_rows, num_seqs = len(step["token_ids"]), len(step["table_rows"])
    check_window(window)
    read_tokens_kernel[(triton.cdiv(max(num_rows, num_seqs), BLOCK),)](
        *(step[name] for name in READ_TOKENS), drawn, proposed, token_ids, window, draft_status, num_rows, num_seqs,
        window.stride(0), drawn.stride(0), proposed.stride(0), vocab_size, WIDTH=window.shape[1], BLOCK=BLOCK,
        num_warps=2,
    )  # fmt: skip


def store_drawn(output_token_ids: Tensor, num_accepted_tokens: Tensor, table_rows: Tensor, drawn: Tensor) -> None:
    num_seqs, width = output_token_ids.shape
    check_output_token_ids(output_token_ids)
    store_drawn_kernel[(triton.cdiv(num_seqs, BLOCK),)](
        output_token_ids, num_accepted_tokens, table_rows, drawn, num_seqs, width, drawn.stride(0), BLOCK=BLOCK,
        num_warps=2,
    )  # fmt: skip


def read_drawn(step: Mapping[str, Tensor], drawn: Tensor, *, vocab_size: int) -> None:
    num_rows, num_seqs = len(step["token_ids"]), len(step["last_rows"])
    read_drawn_kernel[(triton.cdiv(max(num_rows, num_seqs), BLOCK),)](
        *(step[name] for name in READ_DRAWN), drawn, num_rows, num_seqs, drawn.stride(0), vocab_size, BLOCK=BLOCK,
        num_warps=2,
    )  # fmt: skip


def plan_steps(step: Mapping[str, Tensor], block_table: Tensor, drawn: Tensor, *, block_size: int) -> None:
    num_draws, num_seqs = step["token_index"].shape
    plan_steps_kernel[(triton.cdiv(num_seqs, BLOCK),)](
        *(step[name] for name in GIVEN), *(step[name] for name in WORKED_OUT), block_table, drawn, num_seqs,
        block_table.stride(0), drawn.stride(0), block_size, DRAWS=num_draws, BLOCK=BLOCK, num_warps=2,
    )  # fmt: skip


def store_proposals(token_ids: Tensor, status: Tensor, step: Mapping[str, Tensor], proposed: Tensor) -> None:
    num_draws, num_seqs = token_ids.shape
    store_proposals_kernel[(triton.cdiv(num_seqs, BLOCK),)](
        token_ids, status, step["is_wanted"], step["counts"], step["table_rows"], step["stamp"], proposed, num_seqs,
        proposed.stride(0), DRAWS=num_draws, BLOCK=BLOCK, num_warps=2,
    )  # fmt: skip
