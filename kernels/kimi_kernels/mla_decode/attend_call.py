"""One attention over a step's rows, as its launches take it."""

from dataclasses import dataclass

from torch import Tensor

from kimi_kernels.attention_batch import AttentionBatch
from kimi_kernels.mla_decode.geometry import DecodeGeometry


@dataclass(frozen=True, slots=True, kw_only=True)
class AttendCall:
    """The inputs of a call, their cuts, and where results and their parts go. T tokens, N heads, R rows of a tile."""

    q: Tensor
    """[T, N, kv_lora_rank + rope width]."""
    latent_cache: Tensor
    """[num_blocks, block_size, kv_lora_rank + rope width]."""
    batch: AttentionBatch
    row_keys: Tensor | None
    """[T] int32: keys that each row sees; None: as the batch says."""
    geometry: DecodeGeometry
    records: Tensor
    """The plan's, see kernel_plan.py."""
    entries: Tensor
    out: Tensor
    """[T, N, kv_lora_rank]."""
    lse: Tensor | None
    """[T, N] float32, natural log."""
    part_out: Tensor
    """[slots * team_size * R, kv_lora_rank] float32: of sequences that were cut."""
    part_lse: Tensor
    """[slots * team_size * R] float32, base 2."""
    kv_lora_rank: int
    scale: float
    """Softmax scale * kv_scale * log2(e)."""
    kv_scale: float
