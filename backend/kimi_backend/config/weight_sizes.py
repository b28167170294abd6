"""Bytes of the weights that one tensor-parallel rank holds, from the configs alone.

Divided among the ranks: heads, MLP and expert widths, vocabulary rows. Whole on every rank: norms, the router, and
MLA's down-projections. Linear layers are in the compute dtype whatever the file stores and routed experts stay as
stored; the plain kernels hold the matrices of both in float32.
"""

from dataclasses import dataclass

from kimi_backend.config.draft_config import Eagle3MhaDraftConfig, Eagle3MlaDraftConfig
from kimi_backend.config.linear_format import LinearFormat
from kimi_backend.config.mla_dims import MlaDims
from kimi_backend.config.model_config import KimiModelConfig
from kimi_backend.config.quantization_config import QuantizationMethod

_FLOAT32_BYTES = 4
_BFLOAT16_BYTES = 2
_NIBBLES_PER_BYTE = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightFormat:
    """The forms in which a rank keeps weights."""

    tp_size: int = 1
    item_bytes: int = 2
    """The bytes of a number of the compute dtype."""
    widens_matrices: bool = False
    """The plain kernels: matrices of linear layers and experts are float32, whatever is stored."""
    draft_format: LinearFormat = LinearFormat.NONE
    """The format of the draft's linear layers; without effect where `widens_matrices`."""
    draft_head_format: LinearFormat | None = None
    """The format of its head; None takes `draft_format`."""

    @property
    def matrix_bytes(self) -> int:
        """The bytes of a number of a linear layer that is not quantised."""
        return _FLOAT32_BYTES if self.widens_matrices else self.item_bytes

    @property
    def kept_head_bytes(self) -> int:
        """The bytes of a number of the stored head, which stays beside the widened one for a draft to share."""
        return self.item_bytes if self.matrix_bytes != self.item_bytes else 0


def target_weight_bytes(config: KimiModelConfig, weights: WeightFormat) -> int:
    """Bytes of the target's weights on one rank."""
    hidden, item = config.hidden_size, weights.item_bytes
    num_moe, num_dense = config.num_moe_layers, config.num_hidden_layers - config.num_moe_layers
    layer = _mla_matrix_elements(config, hidden, hidden, weights.tp_size)
    others = _mla_other_elements(config, weights.tp_size) + 2 * hidden
    dense = 3 * hidden * config.intermediate_size // weights.tp_size
    shared = 3 * hidden * config.n_shared_experts * config.moe_intermediate_size // weights.tp_size
    # A gate stored in bf16 stays so where the computation is in bf16; any other one is float32, as the bias always is.
    keeps_gate = weights.matrix_bytes == _BFLOAT16_BYTES and config.dtype == "bfloat16"
    router = config.n_routed_experts * (hidden * (item if keeps_gate else _FLOAT32_BYTES) + _FLOAT32_BYTES)
    vocabulary = config.vocab_size * hidden // weights.tp_size
    matrices = config.num_hidden_layers * layer + num_dense * dense + num_moe * shared + vocabulary
    elements = config.num_hidden_layers * others + vocabulary + hidden
    kept_head = vocabulary * weights.kept_head_bytes
    moe_bytes = router + config.n_routed_experts * expert_bytes(config, weights)
    rope = _rope_bytes(config.max_position_embeddings, config.qk_rope_head_dim)
    return matrices * weights.matrix_bytes + elements * item + num_moe * moe_bytes + kept_head + rope


def expert_bytes(config: KimiModelConfig, weights: WeightFormat) -> int:
    """Bytes of one routed expert's three matrices on one rank."""
    hidden, width = config.hidden_size, config.moe_intermediate_size // weights.tp_size
    elements = 3 * hidden * width
    stored = config.expert_format
    if stored.method is QuantizationMethod.NONE or weights.widens_matrices:
        return elements * weights.matrix_bytes
    if stored.group_size:
        scale_bytes = 1 if stored.method is QuantizationMethod.MXFP4 else _BFLOAT16_BYTES
        return elements // _NIBBLES_PER_BYTE + elements // stored.group_size * scale_bytes
    block = stored.block_size
    return elements + 3 * -(-hidden // block) * -(-width // block) * _FLOAT32_BYTES


def draft_weight_bytes(
    config: Eagle3MlaDraftConfig | Eagle3MhaDraftConfig,
    weights: WeightFormat,
    *,
    has_embed: bool = True,
    has_head: bool = True,
) -> int:
    """Bytes of the draft's weights on one rank.

    Args:
        has_embed, has_head: false where the draft uses the target's matrix in place.
    """
    hidden, tp_size = config.hidden_size, weights.tp_size
    linear_format, head_format = weights.draft_format, weights.draft_head_format or weights.draft_format
    kept_head_bytes = weights.kept_head_bytes if head_format is LinearFormat.NONE else 0
    if weights.widens_matrices:
        linear_format = head_format = LinearFormat.NONE
    matrices = _draft_matrices(config, tp_size)
    num_bytes = sum(linear_format.num_bytes(rows, columns, weights.matrix_bytes) for rows, columns in matrices)
    if has_head:
        num_rows = config.draft_vocab_size // tp_size
        num_bytes += head_format.num_bytes(num_rows, hidden, weights.matrix_bytes) + num_rows * hidden * kept_head_bytes
    elements = 2 * hidden + config.num_hidden_layers * 2 * hidden
    has_aux_norm = config.fc_norm or config.norm_before_fc
    elements += config.num_aux_hidden_states * config.target_hidden_size if has_aux_norm else 0
    elements += config.vocab_size * hidden // tp_size if has_embed else 0
    rope_dim = config.head_dim if isinstance(config, Eagle3MhaDraftConfig) else config.qk_rope_head_dim
    if isinstance(config, Eagle3MlaDraftConfig):
        elements += config.num_hidden_layers * _mla_other_elements(config, tp_size)
    return num_bytes + elements * weights.item_bytes + _rope_bytes(config.max_position_embeddings, rope_dim)


def _draft_matrices(config: Eagle3MlaDraftConfig | Eagle3MhaDraftConfig, tp_size: int) -> list[tuple[int, int]]:
    """[out_features, in_features] of the linear layers of one rank, as they are stacked, but for the head."""
    fc = (config.hidden_size // tp_size, config.num_aux_hidden_states * config.target_hidden_size)
    later = (config.num_hidden_layers - 1) * _layer_matrices(config, tp_size, config.hidden_size)
    return [fc, *_layer_matrices(config, tp_size, 2 * config.hidden_size), *later]


def _layer_matrices(
    config: Eagle3MlaDraftConfig | Eagle3MhaDraftConfig, tp_size: int, input_size: int
) -> list[tuple[int, int]]:
    """input_size: width of the rows that the attention reads."""
    hidden, width = config.hidden_size, config.intermediate_size // tp_size
    mlp = [(2 * width, hidden), (hidden, width)]
    heads = config.num_attention_heads // tp_size
    if isinstance(config, Eagle3MhaDraftConfig):
        kv_heads = config.num_key_value_heads // tp_size
        q_width = heads * config.head_dim
        return [*mlp, (q_width + 2 * kv_heads * config.head_dim, input_size), (hidden, q_width)]
    queries, out = heads * config.qk_head_dim, (hidden, heads * config.v_head_dim)
    if config.q_lora_rank is None:
        return [*mlp, (queries + config.latent_dim, input_size), out]
    down = (config.q_lora_rank + config.latent_dim, input_size)
    return [*mlp, down, (queries, config.q_lora_rank), out]


def _mla_matrix_elements(dims: MlaDims, input_size: int, output_size: int, tp_size: int) -> int:
    """Elements of the linear layers of one MLA block on one rank: all but kv_b_proj."""
    heads = dims.num_attention_heads // tp_size
    query_width = heads * dims.qk_head_dim
    rank = dims.q_lora_rank
    queries = query_width * input_size if rank is None else rank * (input_size + query_width)
    return queries + dims.latent_dim * input_size + heads * dims.v_head_dim * output_size


def _mla_other_elements(dims: MlaDims, tp_size: int) -> int:
    """Elements of one MLA block's inner norms and kv_b_proj, which is kept by heads, on one rank."""
    return (dims.q_lora_rank or 0) + dims.kv_lora_rank + _up_elements(dims, tp_size)


def _up_elements(dims: MlaDims, tp_size: int) -> int:
    """Count the elements of kv_b_proj on one rank."""
    return dims.num_attention_heads // tp_size * (dims.qk_nope_head_dim + dims.v_head_dim) * dims.kv_lora_rank


def _rope_bytes(max_positions: int, rope_dim: int) -> int:
    """Count the bytes of the float32 table of cosines and sines."""
    return max_positions * rope_dim * _FLOAT32_BYTES
