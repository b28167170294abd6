"""Upper estimates of what the steps of both models allocate beside weights and KV, from the configs alone.

A runner keeps what its largest step took, and a captured step keeps its own beside that of the steps that run as they
come. Target and draft are two processes, so neither uses what the other has free.
"""

from dataclasses import dataclass

from kimi_backend.config.draft_config import Eagle3MhaDraftConfig, Eagle3MlaDraftConfig
from kimi_backend.config.model_config import KimiModelConfig
from kimi_backend.config.weight_sizes import WeightFormat

_RESIDUAL_COPIES = 6
"""Hidden-width tensors alive at once in a layer."""
_LOGIT_COPIES = 3
"""Copies of logits in a step with processors and log-probabilities: worked on, raw, log-softmax."""
SCORED_ROWS = 64
"""Rows of a prompt whose logits stand at once while its tokens are scored."""
_SCORE_COPIES = 9
"""Copies that are made of them, in float32: logits, two of float64, two keys of 64 bits; with ranks, those gathered."""
_TARGET_AUX_COPIES = 2
"""Aux hidden states side by side, and in the buffer that the draft reads."""
_DRAFT_AUX_COPIES = 3
"""A buffer of the draft's own, the rows of a step, and their norms."""
_FLOAT32_BYTES = 4
TILE_ROWS = 64
"""Rows times heads that attention multiplies at once."""
_MOST_PROMPT_ROWS = 2048
"""Rows of the largest prompt step that is captured."""
_MOST_PROMPT_TILES = 256
"""Tiles of such a step. A rank of few heads has small products, which take less time than launching them; with all 64
heads of a Kimi-K2 on one GPU a layer of 256 rows runs for longer than the host needs to launch the next."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSizes:
    """The largest steps."""

    max_num_batched_tokens: int
    """Rows of any step."""
    max_num_sampled_rows: int
    """Rows of a verify: sequences * (draft tokens + 1)."""
    max_num_seqs: int
    captures: bool = True
    """CUDA graphs are used."""

    @property
    def num_drawn_rows(self) -> int:
        """Rows of the largest captured verify."""
        return min(self.max_num_sampled_rows, self.max_num_batched_tokens) if self.captures else 0

    def num_captured_rows(self, num_heads: int | None) -> int:
        """Rows of the largest captured step. num_heads: see `part_rows`."""
        return (
            max(self.num_drawn_rows, most_prompt_rows(self.max_num_batched_tokens, num_heads)) if self.captures else 0
        )


def part_rows(num_heads: int | None) -> int:
    """Rows of a chunk that fill a tile of attention. num_heads: of this rank; None where the attention is not MLA."""
    return max(1, TILE_ROWS // num_heads) if num_heads else TILE_ROWS


def most_prompt_rows(max_num_batched_tokens: int, num_heads: int | None) -> int:
    """Rows of the largest prompt step that is captured. num_heads: see `part_rows`."""
    return min(max_num_batched_tokens, _MOST_PROMPT_ROWS, _MOST_PROMPT_TILES * part_rows(num_heads))


def target_step_bytes(target: KimiModelConfig, num_aux: int, weights: WeightFormat, sizes: StepSizes) -> int:
    """num_aux: aux hidden states that a draft reads; 0 without a draft."""
    tp_size, hidden, item = weights.tp_size, target.hidden_size, weights.item_bytes
    heads = target.num_attention_heads // tp_size
    attention = heads * (target.qk_head_dim + 2 * target.latent_dim + target.v_head_dim)
    # The products of a token's experts, before they are summed, are as wide as the residual stream, each.
    experts = target.num_experts_per_tok * (2 * target.moe_intermediate_size // tp_size + hidden)
    widest = max(attention, experts, 2 * target.intermediate_size // tp_size)
    a_row = (_RESIDUAL_COPIES * hidden + widest) * item
    aux = num_aux * hidden * item
    rows = sizes.max_num_batched_tokens * (a_row + _TARGET_AUX_COPIES * aux)
    captured = sizes.num_captured_rows(heads) * (a_row + aux) + sizes.num_drawn_rows * hidden * item
    masks = sizes.num_drawn_rows * -(-target.vocab_size // 8)
    logits = _logit_bytes(target.vocab_size, sizes.max_num_sampled_rows, tp_size, sizes)
    scores = SCORED_ROWS * target.vocab_size * _FLOAT32_BYTES * (_SCORE_COPIES + 2 * (tp_size > 1))
    return rows + captured + masks + max(logits, scores)


def draft_step_bytes(
    draft: Eagle3MlaDraftConfig | Eagle3MhaDraftConfig, weights: WeightFormat, sizes: StepSizes
) -> int:
    tp_size, hidden, item = weights.tp_size, draft.hidden_size, weights.item_bytes
    heads = draft.num_attention_heads // tp_size
    if isinstance(draft, Eagle3MlaDraftConfig):
        attention = heads * (draft.qk_head_dim + 2 * draft.latent_dim + draft.v_head_dim)
    else:
        attention = 4 * heads * draft.head_dim
    # A layer reads embedding and hidden state side by side.
    a_row = ((_RESIDUAL_COPIES + 2) * hidden + max(attention, 2 * draft.intermediate_size // tp_size)) * item
    a_row += _DRAFT_AUX_COPIES * draft.num_aux_hidden_states * draft.target_hidden_size * item
    captured = sizes.num_captured_rows(heads if isinstance(draft, Eagle3MlaDraftConfig) else None)
    rows = (sizes.max_num_batched_tokens + captured) * a_row
    return rows + _logit_bytes(draft.draft_vocab_size, sizes.max_num_seqs, tp_size, sizes)


def _logit_bytes(vocab_size: int, num_rows: int, tp_size: int, sizes: StepSizes) -> int:
    """Every rank has all logits; where there are several, also its own columns, and all of them rank by rank."""
    whole = num_rows * vocab_size * _FLOAT32_BYTES
    gathered = whole + whole // tp_size if tp_size > 1 else 0
    return whole * (1 + _LOGIT_COPIES + sizes.captures) + gathered * (1 + sizes.captures)
