"""The formats that a linear layer's weight may be kept in once it is loaded."""

from enum import Enum

_TILE = 128
"""Rows and columns of a quantised weight that the kernels read at once; a weight is padded to whole tiles."""
_INT4_SCALE_BYTES = 8
"""A row of a tile has four bf16 scales, one for each group of 32."""
_FP8_SCALE_BYTES = 4


class LinearFormat(str, Enum):
    """Values are those of the setting `draft_quantization`."""

    NONE = "none"
    """The compute dtype."""
    FP8 = "fp8"
    """float8_e4m3fn, a scale a block of 128 x 128."""
    INT4 = "int4"
    """Symmetric, a bf16 scale a row and group of 32 columns."""

    def num_bytes(self, out_features: int, in_features: int, item_bytes: int) -> int:
        """Count the bytes of one weight as the Triton-language kernels keep it.

        Args:
            item_bytes: of the compute dtype.
        """
        if self is LinearFormat.NONE:
            return out_features * in_features * item_bytes
        row_steps = -(-out_features // _TILE) * _TILE * -(-in_features // _TILE)
        if self is LinearFormat.FP8:
            return row_steps * (_TILE + _FP8_SCALE_BYTES)
        return row_steps * (_TILE // 2 + _INT4_SCALE_BYTES)
