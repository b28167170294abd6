# mypy: disallow-untyped-defs=False, disallow-untyped-calls=False
# mypy: disallow-untyped-decorators=False, disallow-incomplete-defs=False
"""Top-k, top-p and the draw for a list that fits one tile: it stays in registers, every search is a bisection."""

import triton
import triton.language as tl

from kimi_kernels.sampling.kernel_noise import NO_TOKEN, bits_of_tokens, gumbel, token_weight
from kimi_kernels.sampling.kernel_rows import best_of


@triton.jit
def _kth_key(key, alive, k):
    """The largest key that at least k of those alive reach; 0 if there are fewer."""
    low = tl.full((), 0, tl.int64)
    high = low + 0xFFFFFFFF
    while low < high:
        middle = (low + high + 1) // 2
        is_reached = tl.sum((alive & (key >= middle.to(tl.uint32))).to(tl.int32)) >= k
        low = tl.where(is_reached, middle, low)
        high = tl.where(is_reached, high, middle - 1)
    return low.to(tl.uint32)


@triton.jit
def _last_of(token, equal, count, num_tokens):
    """The id up to which `count` of the equal ones lie."""
    low = tl.full((), 0, tl.int32)
    high = low + num_tokens - 1
    while low < high:
        middle = (low + high) // 2
        is_enough = tl.sum((equal & (token <= middle)).to(tl.int32)) >= count
        low = tl.where(is_enough, low, middle + 1)
        high = tl.where(is_enough, middle, high)
    return low


@triton.jit
def keep_top_k(token, key, alive, top_k, num_tokens):
    """Those alive that top-k keeps: the largest keys, the lowest ids among equals."""
    key_k = _kth_key(key, alive, top_k)
    equal = alive & (key == key_k)
    num_above = tl.sum((alive & (key > key_k)).to(tl.int32))
    num_equal = tl.sum(equal.to(tl.int32))
    last = tl.full((), NO_TOKEN, tl.int32)
    if num_above + num_equal > top_k:
        last = _last_of(token, equal, top_k - num_above, num_tokens)
    return alive & ((key > key_k) | (equal & (token <= last)))


@triton.jit
def keep_top_p(key, weight, alive, top_p):
    """Those alive that top-p keeps: less than top_p of the mass lies above them, or none."""
    weight = tl.where(alive, weight, 0).to(tl.int64)
    limit = top_p.to(tl.float64) * tl.sum(weight).to(tl.float64)
    low = tl.full((), 0, tl.int64)
    high = low + 0xFFFFFFFF
    while low < high:
        middle = (low + high) // 2
        above = tl.sum(tl.where(key > middle.to(tl.uint32), weight, 0))
        # Sums of weights are exact in float64.
        survives = (above == 0) | (above.to(tl.float64) < limit)
        low = tl.where(survives, low, middle + 1)
        high = tl.where(survives, middle, high)
    return alive & (key >= low.to(tl.uint32))


@triton.jit
def draw_of_few(tile, best_y, rules, noise_key, num_tokens):
    """The survivor with the best score, the lowest id among equals.

    Args:
        tile: (token, y, key, which min-p left). rules: (top_k, top_p).
    """
    token, y, key, alive = tile
    top_k, top_p = rules
    index, key_low, key_high = noise_key
    if top_k > 0:
        alive = keep_top_k(token, key, alive, top_k, num_tokens)
    if top_p < 1.0:
        alive = keep_top_p(key, token_weight(y, best_y), alive, top_p)
    noise = gumbel(bits_of_tokens(index, token, key_low, key_high))
    _, drawn = best_of(tl.where(alive, y.to(tl.float64) + noise.to(tl.float64), -float("inf")), token)
    return drawn
