"""The device memory that a call of the experts takes, its result included: a plain function, for memory plans."""

from kimi_kernels.moe_experts.launch import (
    FEW_ASSIGNMENTS,
    MAX_CHUNK,
    MAX_SPLITS,
    PERSISTENT_COLUMNS,
    TALL_COLUMNS,
    WIDE_COLUMNS,
    max_tiles,
)
from kimi_kernels.quantization.tiles import TILE_ROWS

ALLOCATION_BYTES = 512
"""The allocator rounds every tensor up to this."""
GATE_UP_ROWS = TILE_ROWS // 2
"""Gate rows a row tile of the first product."""
SORTED_COLUMNS = (*(columns for columns, _ in WIDE_COLUMNS), TALL_COLUMNS, PERSISTENT_COLUMNS)


def moe_scratch_bytes(
    num_tokens: int, top_k: int, num_experts: int, hidden_size: int, intermediate_size: int, bytes_a_value: int = 2
) -> int:
    """Most bytes that `moe_experts` holds at once, for any number of tokens up to `num_tokens`.

    Nearly all of it is activations and products of assignments: num_tokens * top_k * (intermediate_size + hidden_size)
    values, 0.97 GB for 8,192 tokens of Kimi-K2 (top 8, 7168 x 256). The rest sorts the assignments, or sums the first
    product's column ranges where there are few.

    Args:
        num_experts: those held here. intermediate_size: of this rank. bytes_a_value: of the activations' dtype.
    """
    num_assignments = num_tokens * top_k
    hidden = _rounded(num_assignments * intermediate_size * bytes_a_value)
    products = _rounded(num_assignments * hidden_size * bytes_a_value)
    bins = max(16, _power_of_two(num_experts))
    order = max(_order_bytes(num_assignments, num_experts, columns, bins) for columns in SORTED_COLUMNS)
    few = min(num_assignments, FEW_ASSIGNMENTS)
    partials = _rounded(few * -(-intermediate_size // GATE_UP_ROWS) * MAX_SPLITS * TILE_ROWS * 4)
    return hidden + max(products + order, partials)


def _order_bytes(num_assignments: int, num_experts: int, columns: int, bins: int) -> int:
    limit = max_tiles(num_assignments, num_experts, columns)
    counts = -(-num_assignments // MAX_CHUNK) * bins if num_assignments > MAX_CHUNK else 0
    return _rounded(4 * limit) + _rounded(4 * limit * columns) + _rounded(4 * counts) + ALLOCATION_BYTES


def _power_of_two(number: int) -> int:
    return 1 << max(0, number - 1).bit_length()


def _rounded(num_bytes: int) -> int:
    return -(-num_bytes // ALLOCATION_BYTES) * ALLOCATION_BYTES
