"""docs/sampling.md once more, token by token in plain Python with NumPy scalars. Shares no code with the package."""

import numpy as np

from support.sampling_cases import SequenceCase

F = np.float32
LOW_32 = 2**32 - 1
LOG_TEXT = """-0x1.41eep-4 0x1.07d0eep-3 -0x1.0ce07cp-3 0x1.226e4ap-3
    -0x1.54788ap-3 0x1.99a596p-3 -0x1.00022p-2 0x1.55554ap-2"""
EXP2_TEXT = "0x1.e974fcp-10 0x1.277854p-7 0x1.c91ce6p-5 0x1.ebdb56p-3 0x1.62e4bap-1"
LOG = [F(float.fromhex(text)) for text in LOG_TEXT.split()]
EXP2 = [F(float.fromhex(text)) for text in EXP2_TEXT.split()]
NOT_FINITE = (-1, 1)
NO_TOKEN_LEFT = (-1, 2)


def philox_block(counter: tuple[int, ...], key: tuple[int, ...]) -> tuple[int, ...]:
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        a, b = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (b >> 32) ^ c1 ^ k0, b & LOW_32, (a >> 32) ^ c3 ^ k1, a & LOW_32
        k0, k1 = (k0 + 0x9E3779B9) & LOW_32, (k1 + 0xBB67AE85) & LOW_32
    return c0, c1, c2, c3


def bits_of(seed: int, index: int, token: int) -> int:
    return philox_block((index & LOW_32, token // 4, 0, 0), (seed & LOW_32, seed >> 32))[token % 4]


def _split(value: F) -> tuple[int, F]:
    bits = int(value.view(np.int32))
    exponent = (bits - 0x3F3504F3) >> 23
    return exponent, F(np.int32(bits - (exponent << 23)).view(F) - F(1))


def _log(exponent: int, r: F) -> F:
    s, q = F(r * r), F(r * LOG[0])
    for coefficient in LOG[1:7]:
        q = F(F(q + coefficient) * r)
    q = F(q + LOG[7])
    p = F(F(s * r) * q)
    p = F(p + F(F(exponent) * F(float.fromhex("-0x1.bd0106p-13"))))
    p = F(p - F(s * F(0.5)))
    p = F(p + r)
    return F(p + F(F(exponent) * F(float.fromhex("0x1.63p-1"))))


def gumbel(bits: int) -> F:
    is_upper = bits >= 2**31
    t = F(F(F(LOW_32 - bits if is_upper else bits) + F(0.5)) * F(2.0**-32))
    exponent, r = _split(F(F(1) - t) if is_upper else t)
    if is_upper and exponent == 0:
        r = F(-t)
    return F(-_log(*_split(F(-_log(exponent, r)))))


def weight(y: F, best: F) -> int:
    t = F(F(y - best) * F(float.fromhex("0x1.715476p+0")))
    t = max(t, F(-40))
    whole = np.floor(t)
    f = F(t - whole)
    q = F(f * EXP2[0])
    for coefficient in EXP2[1:]:
        q = F(F(q + coefficient) * f)
    return (int(F(q + F(1)) * F(2.0**23)) << 8) >> -int(whole)


def processed_logits(logits: dict[int, F], case: SequenceCase, window_len: int, mask: list[int] | None) -> dict[int, F]:
    """Logits by token id, after penalties, bias and bans."""
    output = case.output + case.window[:window_len]
    before = case.prompt + output
    index = case.token_index(window_len)
    result = {}
    for token, value in logits.items():
        count = output.count(token)
        if case.uses_penalty and token in before:
            repetition = F(case.repetition_penalty)
            value = F(value * F(F(1) / repetition)) if value > 0 else F(value * repetition)
        if case.uses_penalty:
            value = F(value - F(F(case.frequency_penalty) * F(count)))
            if count > 0:
                value = F(value - F(case.presence_penalty))
        if token in case.bias:
            value = F(value + F(case.bias[token]))
        is_banned = index < case.bans.get(token, 0)
        for word in case.bad_words:
            if len(word) > 1 and word[-1] == token and before[-(len(word) - 1) :] == word[:-1]:
                is_banned = True
        if mask is not None and not (mask[token // 32] >> (token % 32)) & 1:
            is_banned = True
        result[token] = F(-np.inf) if is_banned else value
    return result


def survivors(y: dict[int, F], case: SequenceCase) -> list[int]:
    best = max(y.values())
    weights = {token: weight(value, best) for token, value in y.items() if value > -np.inf}
    left = [token for token in weights if weights[token] >= float(F(case.min_p)) * 2.0**31]
    left.sort(key=lambda token: (-float(y[token]), token))
    if case.top_k:
        left = left[: case.top_k]
    if case.top_p >= 1:
        return left
    total = float(F(case.top_p)) * float(sum(weights[token] for token in left))
    above = {token: sum(weights[other] for other in left if y[other] > y[token]) for token in left}
    return [token for token in left if above[token] == 0 or float(above[token]) < total]


def draw(logits: dict[int, F], case: SequenceCase, window_len: int, mask: list[int] | None = None) -> tuple[int, int]:
    """(token id, status) of one row; `logits` by target id."""
    with np.errstate(all="ignore"):
        if any(np.isnan(value) or value == np.inf for value in logits.values()):
            return NOT_FINITE
        l = processed_logits(logits, case, window_len, mask)  # noqa: E741
        is_greedy = F(case.temperature) < F(1e-5)
        y = l if is_greedy else {token: F(value * F(F(1) / F(case.temperature))) for token, value in l.items()}
        if max(y.values()) == -np.inf:
            return NO_TOKEN_LEFT
        if not np.isfinite(max(y.values())):
            return NOT_FINITE
        if is_greedy:
            return min(y, key=lambda token: (-float(y[token]), token)), 0
        index = case.token_index(window_len)
        score = {
            token: float(y[token]) + float(gumbel(bits_of(case.seed, index, token))) for token in survivors(y, case)
        }
        return min(score, key=lambda token: (-score[token], token)), 0
