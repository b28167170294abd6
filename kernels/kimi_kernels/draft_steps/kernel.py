# mypy: disallow-untyped-defs=False, disallow-untyped-calls=False
# mypy: disallow-untyped-decorators=False, disallow-incomplete-defs=False
"""The ops between a verify and the draft step that follows it, one small launch each."""

from collections.abc import Mapping

import triton
import triton.language as tl
from torch import Tensor

from kimi_kernels.argument_checks import require
from kimi_kernels.sampling_inputs import PLACEHOLDER_TOKEN_ID

PLACEHOLDER = tl.constexpr(PLACEHOLDER_TOKEN_ID)
BLOCK = 64
"""Rows or sequences of one program: a step has few."""
EXTENSION = ("token_ids", "last_rows", "drawn_places", "drawn_rows")
GIVEN = ("first_len", "first_index", "most", "room", "drawn_rows")
CORRECTED = ("token_index", "is_wanted", "counts", "seq_lens", "positions", "slots")


@triton.jit(
    do_not_specialize=["num_rows", "num_extended", "num_seqs", "table_stride", "block_size", "vocab_size"],
    do_not_specialize_on_alignment=[
        "token_ids",
        "last_rows",
        "drawn_places",
        "extended_rows",
        "first_len",
        "first_index",
        "most",
        "room",
        "drawn_rows",
        "token_index",
        "is_wanted",
        "counts",
        "seq_lens",
        "positions",
        "slots",
        "accepted",
    ],
)
def follow_verify_kernel(
    token_ids,  # [T] int32
    last_rows,  # [B] int64
    drawn_places,  # [T] int64
    extended_rows,  # [B] int64
    first_len,  # [B'] int64, and so on to drawn_rows
    first_index,
    most,
    room,
    drawn_rows,
    token_index,  # [k, B'] int64
    is_wanted,  # [k, B'] int32
    counts,  # [k, B'] int32
    seq_lens,  # [k - 1, B'] int32
    positions,  # [k - 1, B'] int64
    slots,  # [k - 1, B'] int64
    table,  # [B', table_stride] int32
    drawn,  # [rows, tokens] int64
    accepted,  # [rows] int32
    num_rows,
    num_extended,
    num_seqs,
    table_stride,
    block_size,
    vocab_size,
    DRAWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """BLOCK rows of the extension, sequences of it, and sequences of the proposals."""
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_row = index < num_rows
    token = tl.load(drawn + tl.load(drawn_places + index, mask=is_row, other=0), mask=is_row, other=0)
    token = tl.minimum(tl.maximum(token, 0), vocab_size - 1)
    tl.store(token_ids + index, token.to(tl.int32), mask=is_row)

    is_extended = index < num_extended
    row = tl.load(extended_rows + index, mask=is_extended, other=0)
    last = tl.load(last_rows + index, mask=is_extended, other=0)
    tl.store(last_rows + index, last + tl.load(accepted + row, mask=is_extended, other=0), mask=is_extended)

    is_seq = index < num_seqs
    row = tl.load(drawn_rows + index, mask=is_seq, other=0)
    num_accepted = tl.load(accepted + row, mask=is_seq, other=0).to(tl.int64)
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
    do_not_specialize=["num_seqs", "left_stride"],
    do_not_specialize_on_alignment=["token_ids", "status", "is_wanted", "counts"],
)
def leave_tokens_kernel(
    token_ids,  # [k, B] int64
    status,  # [k, B] int32
    is_wanted,  # [k, B] int32
    counts,  # [k, B] int32
    left,  # [1 + k, left_stride] int32
    num_seqs,
    left_stride,
    DRAWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """BLOCK sequences."""
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_seq = index < num_seqs
    failed = tl.zeros([BLOCK], tl.int32)
    for draw in tl.static_range(DRAWS):
        place = draw * num_seqs + index
        counted = tl.load(status + place, mask=is_seq, other=0) * tl.load(counts + place, mask=is_seq, other=0)
        failed = tl.maximum(failed, counted)
    tl.store(left + index, failed, mask=is_seq)
    for draw in tl.static_range(DRAWS):
        place = draw * num_seqs + index
        token = tl.load(token_ids + place, mask=is_seq, other=0).to(tl.int32)
        is_kept = (tl.load(is_wanted + place, mask=is_seq, other=0) > 0) & (failed == 0)
        tl.store(left + (draw + 1) * left_stride + index, tl.where(is_kept, token, PLACEHOLDER), mask=is_seq)


def follow_verify(
    extension: Mapping[str, Tensor],
    proposals: Mapping[str, Tensor],
    block_table: Tensor,
    output_token_ids: Tensor,
    num_accepted_tokens: Tensor,
    *,
    block_size: int,
    vocab_size: int,
) -> None:
    """See `reference.follow_verify`."""
    num_rows, num_extended = len(extension["token_ids"]), len(extension["last_rows"])
    num_draws, num_seqs = proposals["token_index"].shape
    require(output_token_ids.is_contiguous(), "output_token_ids", output_token_ids.stride(), "contiguous rows")
    follow_verify_kernel[(triton.cdiv(max(num_rows, num_extended, num_seqs), BLOCK),)](
        *(extension[name] for name in EXTENSION),
        *(proposals[name] for name in GIVEN),
        *(proposals[name] for name in CORRECTED),
        block_table,
        output_token_ids,
        num_accepted_tokens,
        num_rows,
        num_extended,
        num_seqs,
        block_table.stride(0),
        block_size,
        vocab_size,
        DRAWS=num_draws,
        BLOCK=BLOCK,
        num_warps=2,
    )


def leave_tokens(token_ids: Tensor, status: Tensor, is_wanted: Tensor, counts: Tensor, left: Tensor) -> None:
    """See `reference.leave_tokens`."""
    num_draws, num_seqs = token_ids.shape
    leave_tokens_kernel[(triton.cdiv(num_seqs, BLOCK),)](
        token_ids,
        status,
        is_wanted,
        counts,
        left,
        num_seqs,
        left.stride(0),
        DRAWS=num_draws,
        BLOCK=BLOCK,
        num_warps=2,
    )
