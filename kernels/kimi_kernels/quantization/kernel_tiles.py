"""Device code that multiplies rows of activations with a weight cut into tiles (`quantization.tiles`).

The product is transposed, [weight rows, columns]: the weight's 128 rows fill the tensor core's tall side, and a step
with few activation rows pads to 8 of them, not to 64 or 128. A *column* of these kernels is a row of activations.
"""

import triton
import triton.language as tl

TILE_ROWS = tl.constexpr(128)
INT4_WORDS = tl.constexpr(32)
FP8_WORDS = tl.constexpr(64)
FLOAT_WORDS = tl.constexpr(64)


def _int4_asm(mask: str, factor: str, shift: str = "") -> tl.constexpr:
    """PTX: the nibbles of two words at one place, as two bf16 that are 2^7 too small. A nibble in a bf16's lowest eight
    bits is a subnormal, 2^133 or 2^129 too small: the factor leaves 2^7 of that, and 8 * 2^-7 are subtracted."""
    return tl.constexpr(
        "{ .reg .b32 t, f, o; mov.b32 f, "
        + factor
        + "; mov.b32 o, 0xbd80bd80; mov.b32 t, $1; "
        + shift
        + "and.b32 t, t, "
        + mask
        + "; fma.rn.bf16x2 $0, t, f, o; }"
    )


def _fp8_asm(sign: str, magnitude: str) -> tl.constexpr:
    """PTX: the bytes of two words at one place, as two bf16."""
    return tl.constexpr(
        "{ .reg .b32 s, t, c; mov.b32 c, 0x7b807b80; mov.b32 s, $1; "
        + sign
        + "and.b32 s, s, 0x80008000; "
        + magnitude
        + "lop3.b32 t, t, 0x07f007f0, s, 0xea; mul.bf16x2 $0, t, c; }"
    )


def _mxfp4_asm(code: str) -> tl.constexpr:
    """PTX: the codes of two words at one place, as two bf16 that are 2^126 too small."""
    return tl.constexpr("{ .reg .b32 s, t; " + code + " }")


LOW_NIBBLES, LOW_FACTOR = "0x000f000f", "0x7e807e80"
HIGH_NIBBLES, HIGH_FACTOR = "0x00f000f0", "0x7c807c80"
SECOND_BYTE = "shr.u32 t, t, 8; "
INT4_ASM_0 = _int4_asm(LOW_NIBBLES, LOW_FACTOR)
INT4_ASM_1 = _int4_asm(HIGH_NIBBLES, HIGH_FACTOR)
# The compiler shares the shift: two planes for one.
INT4_ASM_2 = _int4_asm(LOW_NIBBLES, LOW_FACTOR, SECOND_BYTE)
INT4_ASM_3 = _int4_asm(HIGH_NIBBLES, HIGH_FACTOR, SECOND_BYTE)
MXFP4_ASM_0 = _mxfp4_asm("and.b32 $0, $1, 0x81c081c0;")
MXFP4_ASM_1 = _mxfp4_asm("shl.b32 t, $1, 3; and.b32 $0, t, 0x81c081c0;")
# 68 shifts by 6 and by 2: what overlaps is masked out, and no carry reaches what is not.
MXFP4_ASM_2 = _mxfp4_asm("and.b32 t, $1, 0x20072007; mul.lo.u32 t, t, 68; and.b32 $0, t, 0x81c081c0;")
MXFP4_ASM_3 = _mxfp4_asm(
    "shl.b32 s, $1, 1; and.b32 s, s, 0x80008000; shr.u32 t, $1, 3; lop3.b32 $0, t, 0x01c001c0, s, 0xea;"
)
FP8_ASM_0 = _fp8_asm("shl.b32 s, s, 8; ", "shl.b32 t, $1, 4; ")
FP8_ASM_1 = _fp8_asm("", "shr.u32 t, $1, 4; ")


@triton.jit
def int4_plane(words, PLANE: tl.constexpr, PORTABLE: tl.constexpr):
    """Codes of nibble PLANE, -8 … 7, exact but 2^7 too small, as their scales are 2^7 too large (`tiles`)."""
    if PORTABLE:
        values = (((words >> (4 * PLANE)) & 15).to(tl.float32) - 8.0) * 2.0**-7
    elif PLANE == 0:
        values = tl.inline_asm_elementwise(INT4_ASM_0, "=r,r", [words], dtype=tl.bfloat16, is_pure=True, pack=2)
    elif PLANE == 1:
        values = tl.inline_asm_elementwise(INT4_ASM_1, "=r,r", [words], dtype=tl.bfloat16, is_pure=True, pack=2)
    elif PLANE == 2:
        values = tl.inline_asm_elementwise(INT4_ASM_2, "=r,r", [words], dtype=tl.bfloat16, is_pure=True, pack=2)
    else:
        values = tl.inline_asm_elementwise(INT4_ASM_3, "=r,r", [words], dtype=tl.bfloat16, is_pure=True, pack=2)
    return values


@triton.jit
def mxfp4_scale(packed, PLANE: tl.constexpr):
    """A step's scales of plane PLANE, 2^126 too large, [ROWS] bf16: one mask gives those of two planes (`tiles`)."""
    bits = packed.to(tl.uint32, bitcast=True)
    if PLANE > 1:
        bits = (bits >> 8) | (bits << 24)
    bits = bits & 0x7F807F80
    half = (bits >> 16) if PLANE % 2 == 1 else bits
    return half.to(tl.uint16).to(tl.bfloat16, bitcast=True)


@triton.jit
def mxfp4_plane(words, packed, PLANE: tl.constexpr, PORTABLE: tl.constexpr):
    """Weights of plane PLANE, scaled, exact: powers of two only move a code's exponent.

    Args:
        words: [ROWS, 32]. packed: [ROWS], a step's scales, 2^126 too large (`tiles`).
    """
    if PORTABLE:
        SIGN: tl.constexpr = 15 if PLANE == 0 else 11 + PLANE
        LOW: tl.constexpr = 9 if PLANE == 3 else 6 - 3 * PLANE
        code = (words >> LOW).to(tl.int32) & 7
        halves = tl.where(code < 2, code, (2 + (code & 1)) << (tl.maximum(code >> 1, 1) - 1))
        halves = tl.where((words >> SIGN) & 1 == 1, -halves, halves)
        scale = mxfp4_scale(packed, PLANE).to(tl.float32) * 2.0**-126
        weights = halves.to(tl.float32) * 0.5 * scale[:, None]
    else:
        if PLANE == 0:
            tiny = tl.inline_asm_elementwise(MXFP4_ASM_0, "=r,r", [words], dtype=tl.bfloat16, is_pure=True, pack=2)
        elif PLANE == 1:
            tiny = tl.inline_asm_elementwise(MXFP4_ASM_1, "=r,r", [words], dtype=tl.bfloat16, is_pure=True, pack=2)
        elif PLANE == 2:
            tiny = tl.inline_asm_elementwise(MXFP4_ASM_2, "=r,r", [words], dtype=tl.bfloat16, is_pure=True, pack=2)
        else:
            tiny = tl.inline_asm_elementwise(MXFP4_ASM_3, "=r,r", [words], dtype=tl.bfloat16, is_pure=True, pack=2)
        weights = tiny * mxfp4_scale(packed, PLANE)[:, None]
    return weights


@triton.jit
def fp8_plane(words, PLANE: tl.constexpr, PORTABLE: tl.constexpr):
    """Values of byte PLANE, exact.

    e4m3 and bf16 differ in the width of the exponent: shifted into place, a value is 2^120 too small.
    """
    if PORTABLE:
        values = (words >> (8 * PLANE)).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float32)
    elif PLANE == 0:
        values = tl.inline_asm_elementwise(FP8_ASM_0, "=r,r", [words], dtype=tl.bfloat16, is_pure=True, pack=2)
    else:
        values = tl.inline_asm_elementwise(FP8_ASM_1, "=r,r", [words], dtype=tl.bfloat16, is_pure=True, pack=2)
    return values


@triton.jit
def _dot(weights, x, acc):
    """weights [ROWS, K] x [COLUMNS, K]^T + acc, in x's dtype where that is exact."""
    if weights.dtype == x.dtype:
        acc = tl.dot(weights, tl.trans(x), acc, input_precision="ieee")
    else:
        acc = tl.dot(weights.to(tl.float32), tl.trans(x.to(tl.float32)), acc, input_precision="ieee")
    return acc


@triton.jit
def load_columns(x_rows, is_valid, first, in_features, WIDTH: tl.constexpr, EVEN: tl.constexpr):
    """WIDTH activations of each row from column `first` on; zeros for rows that are not valid.

    Args:
        x_rows: [COLUMNS] pointers to the rows' first elements. is_valid: [COLUMNS].
        EVEN: in_features is a multiple of a step.
    """
    offsets = first + tl.arange(0, WIDTH)
    if EVEN:
        x = tl.load(x_rows[:, None] + offsets[None, :], mask=is_valid[:, None], other=0.0)
    else:
        x = tl.load(
            x_rows[:, None] + offsets[None, :], mask=is_valid[:, None] & (offsets < in_features)[None, :], other=0.0
        )
    return x


@triton.jit
def load_planes(x_rows, is_valid, step, in_features, KIND: tl.constexpr, EVEN: tl.constexpr):
    """The activations that a step's planes multiply: a tuple, one [COLUMNS, plane width] each."""
    if KIND == "int4" or KIND == "mxfp4":
        first = step * (4 * INT4_WORDS)
        planes = (
            load_columns(x_rows, is_valid, first, in_features, INT4_WORDS, EVEN),
            load_columns(x_rows, is_valid, first + INT4_WORDS, in_features, INT4_WORDS, EVEN),
            load_columns(x_rows, is_valid, first + 2 * INT4_WORDS, in_features, INT4_WORDS, EVEN),
            load_columns(x_rows, is_valid, first + 3 * INT4_WORDS, in_features, INT4_WORDS, EVEN),
        )
    elif KIND == "fp8":
        first = step * (2 * FP8_WORDS)
        planes = (
            load_columns(x_rows, is_valid, first, in_features, FP8_WORDS, EVEN),
            load_columns(x_rows, is_valid, first + FP8_WORDS, in_features, FP8_WORDS, EVEN),
        )
    else:
        planes = (load_columns(x_rows, is_valid, step * FLOAT_WORDS, in_features, FLOAT_WORDS, EVEN),)
    return planes


@triton.jit
def load_halves(x_rows, is_valid, step, in_features, KIND: tl.constexpr, EVEN: tl.constexpr):
    """`load_planes` of each half of the columns: a tuple of tuples."""
    halves = ()
    for half in tl.static_range(len(x_rows)):
        halves = halves + (load_planes(x_rows[half], is_valid[half], step, in_features, KIND, EVEN),)
    return halves


@triton.jit
def zeros_of(halves, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Zeros for the products of so many halves: a tuple of [ROWS, COLUMNS]."""
    accs = ()
    for _ in tl.static_range(len(halves)):
        accs = accs + (tl.zeros([ROWS, COLUMNS], tl.float32),)
    return accs


@triton.jit
def _dot_halves(weights, halves, plane, accs):
    """Each half's acc + weights x its plane of activations."""
    sums = ()
    for half in tl.static_range(len(accs)):
        sums = sums + (_dot(weights, halves[half][plane], accs[half]),)
    return sums


@triton.jit
def _add_scaled(accs, products, scale):
    sums = ()
    for half in tl.static_range(len(accs)):
        sums = sums + (accs[half] + products[half] * scale,)
    return sums


@triton.jit
def multiply_tile(
    accs, tiles, scales, step, halves, KIND: tl.constexpr, WORDS: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, SCALE_WEIGHTS: tl.constexpr, PORTABLE: tl.constexpr,
):  # fmt: skip
    """accs + (one step's tile) x (its planes of activations), each weight widened once for all halves.

    Args:
        accs: a tuple, a half of the columns each: [ROWS, COLUMNS] float32. halves: of `load_halves`.
        tiles: the first tile of this row tile. scales: its scales.
        SCALE_WEIGHTS: scale the int4 weights, which rounds them to bf16, rather than the products of a group; pays when
            there are more columns than a group's 32 products. mxfp4 weights are always scaled, which rounds nothing.
    """
    row = tl.arange(0, ROWS)
    word = tl.arange(0, WORDS)
    words = tl.load(tiles + step * (TILE_ROWS * WORDS) + row[:, None] * WORDS + word[None, :])
    if KIND == "int4":
        packed = tl.load(scales + step * TILE_ROWS + row)
        for p in tl.static_range(4):
            weights = int4_plane(words, p, PORTABLE)
            # A bf16 is the upper half of the float32 of the same value.
            scale = ((packed >> (16 * p)).to(tl.int32) << 16).to(tl.float32, bitcast=True)[:, None]
            if SCALE_WEIGHTS:
                accs = _dot_halves(weights * scale.to(weights.dtype), halves, p, accs)
            else:
                products = _dot_halves(weights, halves, p, zeros_of(accs, ROWS, COLUMNS))
                accs = _add_scaled(accs, products, scale)
    elif KIND == "mxfp4":
        packed = tl.load(scales + step * TILE_ROWS + row)
        for p in tl.static_range(4):
            accs = _dot_halves(mxfp4_plane(words, packed, p, PORTABLE), halves, p, accs)
    elif KIND == "fp8":
        scale = tl.load(scales + step * TILE_ROWS + row)[:, None]
        products = _dot_halves(fp8_plane(words, 0, PORTABLE), halves, 0, zeros_of(accs, ROWS, COLUMNS))
        products = _dot_halves(fp8_plane(words, 1, PORTABLE), halves, 1, products)
        accs = _add_scaled(accs, products, scale)
    else:
        accs = _dot_halves(words, halves, 0, accs)
    return accs


@triton.jit
def multiply_steps(
    tiles, scales, x_rows, is_valid, first_step, end_step, in_features, KIND: tl.constexpr, WORDS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr, SCALE_WEIGHTS: tl.constexpr,
    EVEN: tl.constexpr, PORTABLE: tl.constexpr,
):  # fmt: skip
    """(row tile of the weight) x (activation rows) over the steps [first_step, end_step).

    Args:
        x_rows, is_valid: tuples, a half of the columns each: [COLUMNS] pointers to rows; which of them are rows.
    Returns:
        A tuple, a half each: [ROWS, COLUMNS] float32.
    """
    # Else a path around the loop would set the accumulators too, and ptxas would serialise the asynchronous products.
    tl.assume(first_step < end_step)
    accs = zeros_of(x_rows, ROWS, COLUMNS)
    for step in tl.range(first_step, end_step, num_stages=STAGES):
        halves = load_halves(x_rows, is_valid, step, in_features, KIND, EVEN)
        accs = multiply_tile(accs, tiles, scales, step, halves, KIND, WORDS, ROWS, COLUMNS, SCALE_WEIGHTS, PORTABLE)
    return accs


@triton.jit
def first_column(acc):
    """Column 0 of [ROWS, COLUMNS]."""
    column = tl.arange(0, acc.shape[1])
    return tl.sum(tl.where(column[None, :] == 0, acc, 0.0), axis=1)
