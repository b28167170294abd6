# mypy: disallow-untyped-defs=False, disallow-untyped-calls=False
# mypy: disallow-untyped-decorators=False, disallow-incomplete-defs=False
"""The best four by score among the tokens above, judged again, for rows whose candidates all fell to top-p.

A token survives only if less than top-p lies above it, so every survivor lies above every token that fell. Each round
leaves a few per cent of the rows it is done for; the largest y always survives, so the rounds end.
"""

import triton
import triton.language as tl

from kimi_kernels.sampling.kernel_check import count_masses, judge
from kimi_kernels.sampling.kernel_noise import NO_TOKEN, bits_of_tokens, gumbel, load_tokens, token_weight
from kimi_kernels.sampling.kernel_race import insert
from kimi_kernels.sampling.kernel_rows import best_of


@triton.jit
def _best_above(
    source, fallen, rules, noise_key, num_tokens, BLOCK: tl.constexpr, HAS_MAP: tl.constexpr, HAS_WORK: tl.constexpr
):
    """The four tokens with the best scores among those with y above `fallen` that min-p left, best first."""
    inverse, best, least = rules
    index, key_low, key_high = noise_key
    s0 = tl.full((), -float("inf"), tl.float64)
    s1, s2, s3 = s0, s0, s0
    t0 = tl.full((), NO_TOKEN, tl.int32)
    t1, t2, t3 = t0, t0, t0
    for at in tl.range(0, num_tokens, BLOCK):
        token = at + tl.arange(0, BLOCK)
        y = inverse * load_tokens(source, token, token < num_tokens, HAS_MAP, HAS_WORK)
        alive = (y > fallen) & (token_weight(y, best) >= least)
        if tl.max(alive.to(tl.int32)) > 0:
            noise = gumbel(bits_of_tokens(index, token, key_low, key_high))
            score = tl.where(alive, y.to(tl.float64) + noise.to(tl.float64), -float("inf"))
            one, first = best_of(score, token)
            num_left = tl.full((), 4, tl.int32)
            while (one > s3) & (num_left > 0):
                s0, s1, s2, s3, t0, t1, t2, t3 = insert(one, first, s0, s1, s2, s3, t0, t1, t2, t3)
                score = tl.where(token == first, -float("inf"), score)
                one, first = best_of(score, token)
                num_left -= 1
    return t0, t1, t2, t3


@triton.jit
def redraw(
    source, candidates, rules, noise_key, top_p, num_tokens,
    BLOCK: tl.constexpr, HAS_MAP: tl.constexpr, HAS_WORK: tl.constexpr,
):  # fmt: skip
    """The token of a row whose four candidates fell."""
    inverse, best, least = rules
    fallen = tl.full((), -float("inf"), tl.float32)
    for which in tl.static_range(4):
        # What min-p took does not count: weights may rank two neighbours otherwise than y does.
        y = candidates[4 + which]
        fallen = tl.where((token_weight(y, best) >= least) & (y > fallen), y, fallen)
    drawn = tl.full((), NO_TOKEN, tl.int32)
    while (drawn == NO_TOKEN) & (fallen < best):
        c0, c1, c2, c3 = _best_above(source, fallen, rules, noise_key, num_tokens, BLOCK, HAS_MAP, HAS_WORK)
        y0 = inverse * load_tokens(source, c0, c0 != NO_TOKEN, HAS_MAP, HAS_WORK)
        y1 = inverse * load_tokens(source, c1, c1 != NO_TOKEN, HAS_MAP, HAS_WORK)
        y2 = inverse * load_tokens(source, c2, c2 != NO_TOKEN, HAS_MAP, HAS_WORK)
        y3 = inverse * load_tokens(source, c3, c3 != NO_TOKEN, HAS_MAP, HAS_WORK)
        candidates = (c0, c1, c2, c3, y0, y1, y2, y3)
        masses = count_masses(source, 0, source[5], rules, candidates, BLOCK // 4, 2, False, HAS_WORK)
        drawn, _ = judge(masses, candidates, rules, top_p, 0.0)
        # Every round ends higher: the best four, if there are any, lie above what fell before.
        highest = tl.maximum(tl.maximum(y0, y1), tl.maximum(y2, y3))
        fallen = tl.where(highest > fallen, highest, best)
    return drawn
