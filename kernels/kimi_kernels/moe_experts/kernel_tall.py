"""The experts' two products for many assignments an expert, on `kernel_overlapped` (Gluon, Hopper only)."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kimi_kernels.moe_experts.kernel_align import TILE_COUNT_SHIFT
from kimi_kernels.quantization.kernel_overlapped import TILE_ROWS, WORDS, multiply_overlapped

STRIPE = gl.constexpr(8)


@gluon.jit
def load_assignments(assignments, first, count, WIDTH: gl.constexpr, layout: gl.constexpr):
    """WIDTH of a tile's assignments, and which of these columns hold one."""
    column = first + gl.arange(0, WIDTH, layout)
    is_valid = column < count
    return gl.load(assignments + column, mask=is_valid, other=0).to(gl.int64), is_valid


@gluon.jit
def _gate_up_tile(
    X,
    tiles,
    scales,
    HIDDEN,
    assignments,
    count,
    x_stride,
    top_k,
    intermediate_size,
    row_group,
    num_steps,
    KIND: gl.constexpr,
    COLUMNS: gl.constexpr,
    ROWS: gl.constexpr,
    STAGES: gl.constexpr,
    WARPS: gl.constexpr,
):
    copy: gl.constexpr = gl.SliceLayout(1, gl.BlockedLayout([1, 8], [8, 4], [WARPS, 1], [1, 0]))
    assignment, is_valid = load_assignments(assignments, 0, count, COLUMNS, copy)
    acc = multiply_overlapped(
        tiles, scales, X + assignment // top_k * x_stride, is_valid, num_steps, KIND, COLUMNS, ROWS, STAGES, WARPS
    )
    gate, up = acc.reshape([ROWS // (2 * STRIPE), 2, STRIPE, COLUMNS]).permute((0, 2, 3, 1)).split()
    hidden = (gate / (1.0 + gl.exp(-gate)) * up).reshape([ROWS // 2, COLUMNS])
    store: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [1, WARPS], [0, 1])
    hidden = gl.convert_layout(hidden.to(HIDDEN.dtype.element_ty), store)
    assignment, is_valid = load_assignments(assignments, 0, count, COLUMNS, gl.SliceLayout(0, store))
    row = row_group * (ROWS // 2) + gl.arange(0, ROWS // 2, gl.SliceLayout(1, store))
    target = HIDDEN + assignment.expand_dims(0) * intermediate_size + row.expand_dims(1)
    gl.store(target, hidden, mask=is_valid.expand_dims(0) & (row < intermediate_size).expand_dims(1))


@gluon.jit
def gate_up_tall_kernel(
    X,
    TILES,
    SCALES,
    HIDDEN,
    TILE_ENTRIES,
    TILE_ASSIGNMENTS,
    NUM_TILES,
    x_stride,
    top_k,
    intermediate_size,
    num_row_tiles,
    num_steps,
    KIND: gl.constexpr,
    COLUMNS: gl.constexpr,
    ROWS: gl.constexpr,
    STAGES: gl.constexpr,
    WARPS: gl.constexpr,
):
    """`gate_up_sorted_kernel` for 4-bit weights and whole steps; a tile at most half full takes half the columns."""
    program = gl.program_id(0)
    num_groups = num_row_tiles // (ROWS // TILE_ROWS)
    row_group = program % num_groups
    tile = program // num_groups
    if tile >= gl.load(NUM_TILES):
        return
    entry = gl.load(TILE_ENTRIES + tile)
    count = entry >> TILE_COUNT_SHIFT
    matrix = (entry & 0xFFFF).to(gl.int64) * num_row_tiles + row_group * (ROWS // TILE_ROWS)
    tiles = TILES + matrix * num_steps * (TILE_ROWS * WORDS)
    scales = SCALES + matrix * num_steps * TILE_ROWS
    assignments = TILE_ASSIGNMENTS + tile * COLUMNS
    if count > COLUMNS // 2:
        _gate_up_tile(
            X,
            tiles,
            scales,
            HIDDEN,
            assignments,
            count,
            x_stride,
            top_k,
            intermediate_size,
            row_group,
            num_steps,
            KIND,
            COLUMNS,
            ROWS,
            STAGES,
            WARPS,
        )
    else:
        _gate_up_tile(
            X,
            tiles,
            scales,
            HIDDEN,
            assignments,
            count,
            x_stride,
            top_k,
            intermediate_size,
            row_group,
            num_steps,
            KIND,
            COLUMNS // 2,
            ROWS,
            STAGES,
            WARPS,
        )


@gluon.jit
def _down_tile(
    HIDDEN,
    tiles,
    scales,
    OUT,
    assignments,
    count,
    intermediate_size,
    out_features,
    row_group,
    num_steps,
    KIND: gl.constexpr,
    COLUMNS: gl.constexpr,
    ROWS: gl.constexpr,
    STAGES: gl.constexpr,
    WARPS: gl.constexpr,
):
    copy: gl.constexpr = gl.SliceLayout(1, gl.BlockedLayout([1, 8], [8, 4], [WARPS, 1], [1, 0]))
    assignment, is_valid = load_assignments(assignments, 0, count, COLUMNS, copy)
    acc = multiply_overlapped(
        tiles, scales, HIDDEN + assignment * intermediate_size, is_valid, num_steps, KIND, COLUMNS, ROWS, STAGES, WARPS
    )
    store: gl.constexpr = gl.BlockedLayout([8, 1], [16, 2], [1, WARPS], [0, 1])
    product = gl.convert_layout(acc, store).to(OUT.dtype.element_ty)
    assignment, is_valid = load_assignments(assignments, 0, count, COLUMNS, gl.SliceLayout(0, store))
    row = row_group * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, store))
    target = OUT + assignment.expand_dims(0) * out_features + row.expand_dims(1)
    gl.store(target, product, mask=is_valid.expand_dims(0) & (row < out_features).expand_dims(1))


@gluon.jit
def down_tall_kernel(
    HIDDEN,
    TILES,
    SCALES,
    OUT,
    TILE_ENTRIES,
    TILE_ASSIGNMENTS,
    NUM_TILES,
    intermediate_size,
    out_features,
    num_row_tiles,
    num_steps,
    KIND: gl.constexpr,
    COLUMNS: gl.constexpr,
    ROWS: gl.constexpr,
    STAGES: gl.constexpr,
    WARPS: gl.constexpr,
):
    """`down_sorted_kernel` for 4-bit weights and whole steps; a tile at most half full takes half the columns."""
    program = gl.program_id(0)
    num_groups = num_row_tiles // (ROWS // TILE_ROWS)
    row_group = program % num_groups
    tile = program // num_groups
    if tile >= gl.load(NUM_TILES):
        return
    entry = gl.load(TILE_ENTRIES + tile)
    count = entry >> TILE_COUNT_SHIFT
    matrix = (entry & 0xFFFF).to(gl.int64) * num_row_tiles + row_group * (ROWS // TILE_ROWS)
    tiles = TILES + matrix * num_steps * (TILE_ROWS * WORDS)
    scales = SCALES + matrix * num_steps * TILE_ROWS
    assignments = TILE_ASSIGNMENTS + tile * COLUMNS
    if count > COLUMNS // 2:
        _down_tile(
            HIDDEN,
            tiles,
            scales,
            OUT,
            assignments,
            count,
            intermediate_size,
            out_features,
            row_group,
            num_steps,
            KIND,
            COLUMNS,
            ROWS,
            STAGES,
            WARPS,
        )
    else:
        _down_tile(
            HIDDEN,
            tiles,
            scales,
            OUT,
            assignments,
            count,
            intermediate_size,
            out_features,
            row_group,
            num_steps,
            KIND,
            COLUMNS // 2,
            ROWS,
            STAGES,
            WARPS,
        )
