"""EAGLE3 drafts for training, unrolled: `kimi_backend.models.eagle3_draft` in differentiable torch.

Training-time test (Li et al. 2025, arXiv 2503.01840, section 3.2): at serving, step 0 reads the target's hidden state
and later steps the draft's own. So training runs the same: step j of the row that started at position p reads the
token at p + 1 + j and the hidden state that its step j - 1 left, attends to the rows up to p that hold the target's
states and to its own earlier steps, and predicts the token at p + 2 + j. All starts p of a window run side by side.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from kimi_backend.config.draft_config import Eagle3MhaDraftConfig, Eagle3MlaDraftConfig
from kimi_backend.layers.rotary import cos_sin_table
from kimi_nano.formulas import linear, mla_queries_keys_values, rms_norm, rotate, swiglu
from kimi_nano.target import MLA_NAMES, attention_shapes, matrix
from kimi_nano.unrolled_attention import unrolled_attention

DraftConfig = Eagle3MlaDraftConfig | Eagle3MhaDraftConfig
LAYER = "layers.0"


@dataclass(frozen=True, slots=True)
class Unrolled:
    """One step of all starts."""

    normed: Tensor
    """[B, L, H] float32, for the head."""
    hidden: Tensor
    """[B, L, H] float32, which the next step reads."""


class NanoDraft(nn.Module):
    """A draft; parameters carry the checkpoint's names with "/" for "."."""

    cos_sin: Tensor
    kept_tokens: Tensor | None

    def __init__(self, config: DraftConfig, head: Tensor | None = None, kept_tokens: Tensor | None = None) -> None:
        """
        Args:
            head: [draft_vocab_size, H], what a head of its own starts from; None shares the target's.
            kept_tokens: [draft_vocab_size] int64, the target's ids that a reduced head knows; None knows all.
        """
        super().__init__()
        self.config = config
        self.weights = nn.ParameterDict()
        hidden = config.hidden_size
        chunks = config.num_aux_hidden_states
        self._add("fc.weight", matrix(hidden, chunks * config.target_hidden_size))
        if config.fc_norm:
            for chunk in range(chunks):
                self._add(f"fc_norm.{chunk}.weight", nn.Parameter(torch.ones(config.target_hidden_size)))
        for norm in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
            self._add(f"{LAYER}.{norm}.weight", nn.Parameter(torch.ones(hidden)))
        for name, shape in _attention_shapes(config).items():
            parameter = matrix(*shape) if len(shape) == 2 else nn.Parameter(torch.ones(shape))
            self._add(f"{LAYER}.self_attn.{name}.weight", parameter)
        width = config.intermediate_size
        for name, shape in (
            ("gate_proj", (width, hidden)),
            ("up_proj", (width, hidden)),
            ("down_proj", (hidden, width)),
        ):
            self._add(f"{LAYER}.mlp.{name}.weight", matrix(*shape))
        self._add("norm.weight", nn.Parameter(torch.ones(hidden)))
        if head is not None:
            self._add("lm_head.weight", nn.Parameter(head.detach().clone()))
        rope_dim = config.qk_rope_head_dim if isinstance(config, Eagle3MlaDraftConfig) else config.head_dim
        table = cos_sin_table(rope_dim, config.max_position_embeddings, config.rope, torch.device("cpu"))
        self.register_buffer("cos_sin", table, persistent=False)
        self.register_buffer("kept_tokens", kept_tokens)
        self.functions: tuple[Callable[..., tuple[Tensor, ...]], ...] = (_before_attention, _after_attention)
        """The parts of a step before and after attention."""

    def compile_step(self) -> None:
        """Compile `functions`, for training on one shape."""
        self.functions = tuple(torch.compile(function) for function in self.functions)

    def combine_aux(self, aux: Tensor, dtype: torch.dtype) -> Tensor:
        """[..., C * Ht] -> [..., H] float32."""
        if self.config.fc_norm:
            parts = aux.unflatten(-1, (self.config.num_aux_hidden_states, -1)).unbind(-2)
            normed = [rms_norm(x, self.weight(f"fc_norm.{i}.weight"), self._eps) for i, x in enumerate(parts)]
            aux = torch.cat(normed, dim=-1)
        return linear(aux, self.weight("fc.weight"), dtype).float()

    def start(self, length: int) -> "Unrolling":
        """Begin to unroll over windows of `length` starts."""
        return Unrolling(self, length)

    def head(self, target_head: Tensor) -> Tensor:
        return self.weight("lm_head.weight") if "lm_head/weight" in self.weights else target_head

    def weight(self, name: str) -> Tensor:
        weight: Tensor = self.weights[name.replace(".", "/")]
        return weight

    @property
    def _eps(self) -> float:
        return self.config.rms_norm_eps

    def _add(self, name: str, parameter: nn.Parameter) -> None:
        self.weights[name.replace(".", "/")] = parameter

    def layer_weight(self, name: str) -> Tensor:
        return self.weight(f"{LAYER}.{name}.weight")

    def queries_keys_values(self, x: Tensor, cos_sin: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """x: [T, 2H] -> q, k [T, N, D], v [T, N, V]."""
        config = self.config
        if isinstance(config, Eagle3MlaDraftConfig):
            weights = {name: self.layer_weight(f"self_attn.{name}") for name in MLA_NAMES}
            return mla_queries_keys_values(x, weights, cos_sin, config, self._eps, dtype)
        parts = [linear(x, self.layer_weight(f"self_attn.{name}_proj"), dtype) for name in ("q", "k", "v")]
        q, k, v = (part.unflatten(-1, (-1, config.head_dim)) for part in parts)
        angles, repeats = cos_sin[:, None], config.num_attention_heads // config.num_key_value_heads
        q, k = (rotate(part, angles, config.rope.interleaved) for part in (q, k))
        return q, k.repeat_interleave(repeats, dim=1), v.repeat_interleave(repeats, dim=1)


class Unrolling:
    """The steps of all starts of a batch, and the keys and values they have left."""

    def __init__(self, draft: NanoDraft, length: int) -> None:
        self._draft = draft
        self._length = length
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []

    def step(self, embedded: Tensor, hidden: Tensor, dtype: torch.dtype) -> Unrolled:
        """
        Args:
            embedded: [B, L, H], embedding of each start's next token, by the target's table.
            hidden: [B, L, H]: `combine_aux` at step 0, then what the step before left.
        """
        draft, number = self._draft, len(self._keys)
        before, after = draft.functions
        cos_sin = draft.cos_sin[number : number + self._length].repeat(hidden.shape[0], 1)
        residual, *parts = before(draft, embedded.flatten(0, 1), hidden.flatten(0, 1), cos_sin, dtype)
        q, k, v = (part.unflatten(0, (-1, self._length)).transpose(1, 2) for part in parts)
        self._keys.append(k)
        self._values.append(v)
        heads = unrolled_attention(q, self._keys, self._values, draft.config.softmax_scale)
        normed, left = after(draft, residual, heads.transpose(1, 2).flatten(2).flatten(0, 1), dtype)
        return Unrolled(normed.view_as(hidden), left.view_as(hidden))


def _before_attention(
    draft: NanoDraft, embedded: Tensor, hidden: Tensor, cos_sin: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """[T, H] residual stream, q, k [T, N, D] and v [T, N, V]."""
    eps = draft.config.rms_norm_eps
    normed_hidden = rms_norm(hidden, draft.layer_weight("hidden_norm"), eps)
    x = torch.cat((rms_norm(embedded, draft.layer_weight("input_layernorm"), eps), normed_hidden), dim=-1)
    residual = normed_hidden if draft.config.norm_before_residual else hidden
    return residual, *draft.queries_keys_values(x, cos_sin, dtype)


def _after_attention(draft: NanoDraft, residual: Tensor, heads: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """[T, H] for the head, and [T, H] for the next step."""
    eps = draft.config.rms_norm_eps
    residual = residual + linear(heads, draft.layer_weight("self_attn.o_proj"), dtype)
    post = rms_norm(residual, draft.layer_weight("post_attention_layernorm"), eps)
    gate, up, down = (draft.layer_weight(f"mlp.{name}") for name in ("gate_proj", "up_proj", "down_proj"))
    residual = residual + swiglu(post, gate, up, down, dtype)
    normed = rms_norm(residual, draft.weight("norm.weight"), eps)
    return normed, normed if draft.config.norm_output else residual


def _attention_shapes(config: DraftConfig) -> dict[str, tuple[int, ...]]:
    hidden = config.hidden_size
    if isinstance(config, Eagle3MlaDraftConfig):
        return attention_shapes(config, 2 * hidden, hidden)
    q_width, kv_width = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    return {
        "q_proj": (q_width, 2 * hidden),
        "k_proj": (kv_width, 2 * hidden),
        "v_proj": (kv_width, 2 * hidden),
        "o_proj": (hidden, q_width),
    }
