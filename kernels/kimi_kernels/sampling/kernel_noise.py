# mypy: disallow-untyped-defs=False, disallow-untyped-calls=False
# mypy: disallow-untyped-decorators=False, disallow-incomplete-defs=False
"""Device functions behind every sampling kernel: noise, weights, keys, the same bits as the reference's.

Launches pass `enable_fp_fusion=False`: a fused multiply-add would round once where the definition rounds twice.
"""

import triton
import triton.language as tl

from kimi_kernels.sampling import constants
from kimi_kernels.sampling_inputs import GREEDY_TEMPERATURE

NO_TOKEN = tl.constexpr(2**31 - 1)
"""A token id above all others."""
GREEDY_BELOW = tl.constexpr(GREEDY_TEMPERATURE)
MULTIPLIER_0 = tl.constexpr(constants.PHILOX_MULTIPLIERS[0])
MULTIPLIER_1 = tl.constexpr(constants.PHILOX_MULTIPLIERS[1])
KEY_STEP_0 = tl.constexpr(constants.PHILOX_KEY_STEPS[0])
KEY_STEP_1 = tl.constexpr(constants.PHILOX_KEY_STEPS[1])
ROUNDS = tl.constexpr(constants.PHILOX_ROUNDS)
TO_UNIT = tl.constexpr(constants.TWO_TO_MINUS_32)
SQRT_HALF_BITS = tl.constexpr(constants.SQRT_HALF_BITS)
LN2_HIGH = tl.constexpr(constants.LN2_HIGH)
LN2_LOW = tl.constexpr(constants.LN2_LOW)
L0, L1, L2, L3, L4, L5, L6, L7 = map(tl.constexpr, constants.LOG_COEFFICIENTS)
LOG2_E = tl.constexpr(constants.LOG2_E)
E0, E1, E2, E3, E4 = map(tl.constexpr, constants.EXP2_COEFFICIENTS)
MIN_EXP2_ARGUMENT = tl.constexpr(constants.MIN_EXP2_ARGUMENT)
WEIGHT_SHIFT = tl.constexpr(constants.WEIGHT_BITS - 23)
WEIGHT_ONE = tl.constexpr(2.0**constants.WEIGHT_BITS)
BOUND_MARGIN = tl.constexpr(1e-3)
BOUND_ULPS = tl.constexpr(2.0**-21)
SCALE_OF_BITS = tl.constexpr(2.0**32)
REACH_SLACK = tl.constexpr(1024.0)
"""More than bits and the sum lose to float32: 128 each."""


@triton.jit
def philox_words(index, block, key_low, key_high):
    """Four words for each token block. index, key_low, key_high: uint32 scalars; block: uint32 of any shape.

    What does not depend on the block stays scalar through the first rounds.
    """
    c0 = index
    c1 = block
    c2 = index * 0
    c3 = index * 0
    for _ in tl.static_range(ROUNDS):
        # One widening product an instruction; asking for both halves apart would take two.
        product_0 = c0.to(tl.uint64) * MULTIPLIER_0
        product_1 = c2.to(tl.uint64) * MULTIPLIER_1
        high_0, low_0 = (product_0 >> 32).to(tl.uint32), product_0.to(tl.uint32)
        high_1, low_1 = (product_1 >> 32).to(tl.uint32), product_1.to(tl.uint32)
        c0 = high_1 ^ (c1 ^ key_low)
        c1 = low_1
        c2 = high_0 ^ (c3 ^ key_high)
        c3 = low_0
        key_low += KEY_STEP_0
        key_high += KEY_STEP_1
    return c0, c1, c2, c3


@triton.jit
def bits_of_tokens(index, token, key_low, key_high):
    """Noise bits of tokens in any order: a Philox call each."""
    w0, w1, w2, w3 = philox_words(index, (token >> 2).to(tl.uint32), key_low, key_high)
    word = token & 3
    return tl.where(word < 2, tl.where(word == 0, w0, w1), tl.where(word == 2, w2, w3))


@triton.jit
def bits_of_blocks(index, first_block, key_low, key_high, BLOCKS: tl.constexpr):
    """Noise bits of 4 * BLOCKS neighbouring tokens, [BLOCKS, 4]."""
    block = (first_block + tl.arange(0, BLOCKS)).to(tl.uint32)
    w0, w1, w2, w3 = philox_words(index, block, key_low, key_high)
    return tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), (BLOCKS, 4))


@triton.jit
def _split_float(value):
    bits = value.to(tl.int32, bitcast=True)
    exponent = (bits - SQRT_HALF_BITS) >> 23
    mantissa = (bits - (exponent << 23)).to(tl.float32, bitcast=True)
    return exponent, mantissa - 1.0


@triton.jit
def _log(exponent, r):
    e = exponent.to(tl.float32)
    s = r * r
    q = r * L0
    q = (q + L1) * r
    q = (q + L2) * r
    q = (q + L3) * r
    q = (q + L4) * r
    q = (q + L5) * r
    q = (q + L6) * r
    q = q + L7
    p = (s * r) * q
    p = p + e * LN2_LOW
    p = p - s * 0.5
    p = p + r
    return p + e * LN2_HIGH


@triton.jit
def gumbel(bits):
    """uint32 bits to float32 noise (docs/sampling.md, "Gumbel noise")."""
    signed = bits.to(tl.int32, bitcast=True)
    is_upper = signed < 0
    t = ((signed ^ (signed >> 31)).to(tl.float32) + 0.5) * TO_UNIT
    exponent, r = _split_float(tl.where(is_upper, 1.0 - t, t))
    r = tl.where(is_upper & (exponent == 0), 0.0 - t, r)
    exponent, r = _split_float(0.0 - _log(exponent, r))
    return 0.0 - _log(exponent, r)


@triton.jit
def lowered_bound(bound):
    """A little below: covers the rounding of `reach`, also beside large logits."""
    return (bound - tl.abs(bound) * BOUND_ULPS) - BOUND_MARGIN


@triton.jit
def likelihood(raw, scale, bound):
    """exp(raw * inverse temperature - bound), a few units of 2^-22 off. scale: inverse temperature * log2(e)."""
    return tl.exp2(tl.fma(raw, scale, 0.0 - bound * LOG2_E))


@triton.jit
def reach(bits, likelihood, factor):
    """A number that is not below 0 if y + gumbel(bits) may be at least the bound: too often, never too rarely.

    -log(-log(u)) <= -log(1 - u), so the score reaches the bound only if 1 - u <= exp(y - bound). Both sides are scaled
    by 2^32. A sixth of the work of `gumbel`.

    Args:
        likelihood: exp(y - base). factor: exp(base - bound), for the `lowered_bound` of the bound.
    """
    return tl.fma(likelihood, factor * SCALE_OF_BITS, REACH_SLACK - SCALE_OF_BITS) + bits.to(tl.float32)


@triton.jit
def token_weight(y, best):
    """exp(y - best) in units of 2^-31, rounded down: uint32 (docs/sampling.md, "Weights")."""
    t = tl.maximum((y - best) * LOG2_E, MIN_EXP2_ARGUMENT)
    whole = tl.floor(t)
    f = t - whole
    q = f * E0
    q = (q + E1) * f
    q = (q + E2) * f
    q = (q + E3) * f
    q = (q + E4) * f
    mantissa = ((q + 1.0) * 8388608.0).to(tl.int32).to(tl.uint32)
    shift = (0.0 - whole).to(tl.int32)
    weight = (mantissa << WEIGHT_SHIFT) >> tl.minimum(shift, 31).to(tl.uint32)
    return tl.where(shift > 31, 0, weight)


@triton.jit
def min_weight(min_p):
    """Smallest weight that min-p keeps; the product by a power of two is exact."""
    return tl.ceil(min_p * WEIGHT_ONE).to(tl.int64).to(tl.uint32)


@triton.jit
def order_key(y):
    """uint32 that orders like float32; y has no NaN. Adding 0 makes -0 equal to 0."""
    bits = (y + 0.0).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.uint32, bitcast=True) ^ 0x80000000


@triton.jit
def signed_key(y):
    """int32 that orders like float32: its maximum is one instruction a warp."""
    bits = y.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def from_signed_key(key):
    """The float32 of a `signed_key`."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def from_order_key(key):
    """The float32 of an `order_key`."""
    bits = (key ^ 0x80000000).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def inverse_temperature(temperature):
    """1 / temperature, or 1 for greedy rows: their y is the logit itself."""
    return tl.where(temperature < GREEDY_BELOW, 1.0, tl.div_rn(1.0, temperature))


@triton.jit
def load_columns(source, column, mask, HAS_WORK: tl.constexpr):
    """Processed logits of a row as float32; -inf outside the mask. No mask reads all.

    source: (LOGITS, WORK, COLUMN_OF_TOKEN, row, row_stride, num_columns, uses_work), as in `draw_kernel`.
    """
    LOGITS, WORK, _, row, row_stride, num_columns, uses_work = source
    raw_at = LOGITS + row.to(tl.int64) * row_stride + column
    if HAS_WORK:
        if mask is None:
            mask = column >= 0
        made_at = WORK + row.to(tl.int64) * num_columns + column
        raw = tl.load(raw_at, mask=mask & (uses_work == 0), other=-float("inf")).to(tl.float32)
        value = tl.where(uses_work, tl.load(made_at, mask=mask & uses_work, other=-float("inf")), raw)
    elif mask is None:
        value = tl.load(raw_at).to(tl.float32)
    else:
        value = tl.load(raw_at, mask=mask, other=-float("inf")).to(tl.float32)
    return value


@triton.jit
def load_tokens(source, token, mask, HAS_MAP: tl.constexpr, HAS_WORK: tl.constexpr):
    """Load as `load_columns` does, by token id; -inf where no column holds the token."""
    if HAS_MAP:
        column = tl.load(source[2] + token, mask=mask, other=-1).to(tl.int32)
        return load_columns(source, column, mask & (column >= 0), HAS_WORK)
    return load_columns(source, token, mask, HAS_WORK)


@triton.jit
def is_not_finite(value):
    """NaN or +inf."""
    return (value < float("inf")) == 0
