# mypy: disallow-untyped-defs=False, disallow-untyped-calls=False
# mypy: disallow-untyped-decorators=False, disallow-incomplete-defs=False
"""The conventions of the sampling kernels: states of a row, tiles of its columns, the order of tokens."""

import triton
import triton.language as tl

from kimi_kernels.sampling.constants import WEIGHT_BITS
from kimi_kernels.sampling.kernel_noise import NO_TOKEN, load_columns, load_tokens
from kimi_kernels.sampling_inputs import PLACEHOLDER_TOKEN_ID, STATUS_NO_TOKEN_LEFT, STATUS_NOT_FINITE, STATUS_OK

CANDIDATES = tl.constexpr(4)
"""Candidates a row keeps: a top-p row needs `kernel_select` only if none of them survives."""
STATE_DONE = tl.constexpr(0)
STATE_ESTIMATE = tl.constexpr(1)
"""The second pass sums floats. STATE_COUNT: integers. STATE_LIST: it lists what top-k or min-p may keep."""
STATE_COUNT = tl.constexpr(2)
STATE_LIST = tl.constexpr(3)
STATE_SELECT = tl.constexpr(4)
"""The general way. STATE_DOUBT: only if the candidates, counted in integers, all fall."""
STATE_DOUBT = tl.constexpr(5)
LISTED = tl.constexpr(4096)
"""Tokens that fit a row's list; a row with more to list is selected from all tokens."""
NEVER = tl.constexpr(0xFFFFFFFF)
"""A key above all."""
DOUBT = tl.constexpr(8e-5)
"""The margin for the order of summation and for moving sums to another base."""
DOUBT_A_LOGIT = tl.constexpr(2.0**-20)
"""More for each unit of the largest logit: the exponent's argument is rounded at its size."""
WEIGHT_UNIT = tl.constexpr(2.0**-WEIGHT_BITS)
"""Each integer weight drops a fraction of it, in units of the largest weight."""
PLACEHOLDER = tl.constexpr(PLACEHOLDER_TOKEN_ID)
OK = tl.constexpr(STATUS_OK)
NOT_FINITE = tl.constexpr(STATUS_NOT_FINITE)
NO_TOKEN_LEFT = tl.constexpr(STATUS_NO_TOKEN_LEFT)


@triton.jit
def room_for_doubt(best_y, mass, num_columns):
    """The share of a row's mass by which float32 sums may be off from those of integer weights.

    mass: in units of the largest weight.
    """
    return DOUBT + (tl.abs(best_y) + 32.0) * DOUBT_A_LOGIT + (num_columns * WEIGHT_UNIT / mass).to(tl.float32)


@triton.jit
def tile_columns(start, BLOCKS: tl.constexpr):
    """[BLOCKS, 4] columns from `start`: a block of four tokens a row."""
    return start + tl.arange(0, BLOCKS)[:, None] * 4 + tl.arange(0, 4)[None, :]


@triton.jit
def load_tile(source, at, stop, BLOCKS: tl.constexpr, EVEN: tl.constexpr, HAS_WORK: tl.constexpr):
    """Processed logits of `tile_columns`; EVEN: splits are whole tiles; a tile past the end reads the last again."""
    if EVEN:
        value = load_columns(source, tile_columns(tl.minimum(at, stop - BLOCKS * 4), BLOCKS), None, HAS_WORK)
    else:
        column = tile_columns(at, BLOCKS)
        value = load_columns(source, column, column < stop, HAS_WORK)
    return value


@triton.jit
def best_of(score, token):
    """Largest score and the lowest token among its equals."""
    best = tl.max(score)
    return best, tl.min(tl.where(score == best, token, NO_TOKEN))


@triton.jit
def candidate_logit(source, token, inverse, HAS_MAP: tl.constexpr, HAS_WORK: tl.constexpr):
    """y of a token; -inf for NO_TOKEN."""
    is_token = token != NO_TOKEN
    if HAS_MAP:
        return inverse * load_tokens(source, token, is_token, HAS_MAP, HAS_WORK)
    return inverse * load_columns(source, token, is_token, HAS_WORK)


@triton.jit
def next_digit(key, left, counts, shift: tl.constexpr):
    """One byte of a radix selection: (key with the byte that holds the left-th largest, its place within)."""
    above = tl.sum(counts) - tl.cumsum(counts, 0)
    is_digit = (above < left) & (left <= above + counts)
    digit = tl.sum(tl.where(is_digit, tl.arange(0, 256), 0)).to(tl.uint32)
    return key | (digit << shift), left - tl.sum(tl.where(is_digit, above, 0))
