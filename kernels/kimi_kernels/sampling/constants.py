"""Numbers that define the noise and the weights (docs/sampling.md), shared by torch and the kernels.

Every float here is exactly a float32, written in hexadecimal so that reading it rounds nothing.
"""

PHILOX_ROUNDS = 10
PHILOX_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
PHILOX_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
"""Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3", section 3.3 and its Random123 library."""

SAMPLE_INDEX = 0
"""Third counter word: which of n samples of one request. One until n > 1 exists."""

TWO_TO_MINUS_32 = float.fromhex("0x1p-32")

SQRT_HALF_BITS = 0x3F3504F3
"""Bits of float32 sqrt(1/2): a mantissa is brought into [sqrt(1/2), sqrt(2))."""

LN2_HIGH = float.fromhex("0x1.63p-1")
"""ln 2 cut to nine bits: its product with an exponent is exact."""
LN2_LOW = float.fromhex("-0x1.bd0106p-13")

LOG_COEFFICIENTS = tuple(
    map(
        float.fromhex,
        (
            "-0x1.41eep-4",
            "0x1.07d0eep-3",
            "-0x1.0ce07cp-3",
            "0x1.226e4ap-3",
            "-0x1.54788ap-3",
            "0x1.99a596p-3",
            "-0x1.000220p-2",
            "0x1.55554ap-2",
        ),
    )
)
"""(log(1 + r) - r + r^2 / 2) / r^3, highest power first: minimax on [sqrt(1/2) - 1, sqrt(2) - 1]."""

LOG2_E = float.fromhex("0x1.715476p+0")

EXP2_COEFFICIENTS = tuple(
    map(
        float.fromhex,
        (
            "0x1.e974fcp-10",
            "0x1.277854p-7",
            "0x1.c91ce6p-5",
            "0x1.ebdb56p-3",
            "0x1.62e4bap-1",
        ),
    )
)
"""(2^f - 1) / f, highest power first: minimax on [0, 1] for the relative error of 2^f."""

MIN_EXP2_ARGUMENT = -40.0
"""Below it every weight is 0."""

WEIGHT_BITS = 31
"""The most likely token weighs 2^31."""
