"""The contract of every op: one Protocol each, implemented by each kernel set.

Dimensions: T tokens of the step, N attention heads on this rank, H hidden, L kv_lora_rank, P qk_nope_head_dim,
R qk_rope_head_dim, V v_head_dim, E experts, K experts a token. Ops return new tensors unless they say "in place".
Accumulation is float32 or wider; results have the dtype of the first argument unless stated.
"""

from typing import Protocol

from torch import Tensor

from kimi_kernels.attention_batch import AttentionBatch, DecodePlan
from kimi_kernels.sampling_inputs import (
    SampleOutput,
    SamplingInputs,
    SamplingRows,
    VerifyOutput,
    VocabularyMap,
)
from kimi_kernels.weights import ExpertWeights, PackedExperts, PackedWeight, Weight


class PackLinear(Protocol):
    """Lay a linear layer's weight out for `Linear`, at load."""

    def __call__(self, weight: Weight) -> PackedWeight:
        """weight: [out_features, in_features]."""
        ...


class Linear(Protocol):
    """x @ weight.T."""

    def __call__(self, x: Tensor, weight: PackedWeight) -> Tensor:
        """x: [T, in_features] -> [T, out_features]."""
        ...


class PerHeadLinear(Protocol):
    """One matrix a head: out[t, n] = x[t, n] @ weight[n]."""

    def __call__(self, x: Tensor, weight: Tensor) -> Tensor:
        """x: [T, N, in_features], may be strided; weight: [N, in_features, out_features] -> [T, N, out_features]."""
        ...


class RmsNorm(Protocol):
    """x / sqrt(mean(x^2) + eps) * weight (Zhang & Sennrich 2019)."""

    def __call__(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x: [T, H], may be strided between rows; weight: [H] -> [T, H]."""
        ...


class AddRmsNorm(Protocol):
    """Add to the residual stream, then norm the sum."""

    def __call__(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """x, residual: [T, H] -> (normed [T, H], x + residual [T, H])."""
        ...


class ConcatRmsNorm(Protocol):
    """[norm(a), norm(b)]: the doubled input of an EAGLE3 layer."""

    def __call__(self, a: Tensor, a_weight: Tensor, b: Tensor, b_weight: Tensor, eps: float) -> Tensor:
        """a: [T, Ha], b: [T, Hb] -> [T, Ha + Hb]."""
        ...


class ChunkedRmsNorm(Protocol):
    """Each of C equal chunks of a row gets its own norm: EAGLE3.1's `fc_norm`."""

    def __call__(self, x: Tensor, weights: Tensor, eps: float) -> Tensor:
        """x: [T, C * H], weights: [C, H] -> [T, C * H]."""
        ...


class SiluMul(Protocol):
    """silu(first half) * second half."""

    def __call__(self, gate_up: Tensor) -> Tensor:
        """gate_up: [T, 2 * I] -> [T, I]."""
        ...


class Rope(Protocol):
    """Rotate each head by its row's position (Su et al. 2021)."""

    def __call__(self, x: Tensor, cos_sin: Tensor, positions: Tensor, interleaved: bool) -> Tensor:
        """
        Args:
            x: [T, N, R], may be strided.
            cos_sin: [max_positions, R] float32: cosines of the R / 2 frequencies, then their sines.
            positions: [T] int64.
            interleaved: pairs are (2i, 2i + 1) if true, (i, i + R / 2) if false. The result keeps the pairing.
        """
        ...


class StoreLatent(Protocol):
    """Norm the compressed KV, rotate the shared key, write both into the paged latent cache, in place."""

    def __call__(
        self,
        kv_a: Tensor,
        norm_weight: Tensor,
        eps: float,
        cos_sin: Tensor,
        positions: Tensor,
        interleaved: bool,
        latent_cache: Tensor,
        slot_mapping: Tensor,
        kv_scale: float = 1.0,
    ) -> None:
        """
        Args:
            kv_a: [T, L + R], output of kv_a_proj_with_mqa, raw; may be strided between rows.
            norm_weight: [L], kv_a_layernorm.
            cos_sin, positions, interleaved: as in `Rope`.
            latent_cache: [num_blocks, block_size, L + R], contiguous; float8 holds value / kv_scale.
            slot_mapping: [T] int64; -1 writes nothing.
        """
        ...


class PlanMlaDecode(Protocol):
    """Divide the batch's keys among thread blocks, on the device, without a host sync."""

    def __call__(
        self, batch: AttentionBatch, num_heads: int, block_size: int, split_tokens: int = 0
    ) -> DecodePlan | None:
        """split_tokens: 0 balances over the batch; else a sequence is cut every so many tokens, whatever the batch."""
        ...


class MlaQuery(Protocol):
    """A head's query for `MlaDecode`: its first part moved into the latent space, its second part rotated."""

    def __call__(
        self,
        q: Tensor,
        w_uk: Tensor,
        cos_sin: Tensor,
        positions: Tensor,
        interleaved: bool,
    ) -> Tensor:
        """
        Args:
            q: [T, N, P + R], may be strided.
            w_uk: [N, P, L], contiguous.
            cos_sin, positions, interleaved: as in `Rope`, for the R columns.
        Returns:
            [T, N, L + R]: q_nope @ w_uk, then rotated q_pe.
        """
        ...


class MlaDecode(Protocol):
    """Absorbed multi-head latent attention (DeepSeek-V2, section 2.1.2) over paged latents: one KV read for all
    query rows of a sequence."""

    def __call__(
        self,
        q: Tensor,
        latent_cache: Tensor,
        batch: AttentionBatch,
        kv_lora_rank: int,
        softmax_scale: float,
        kv_scale: float = 1.0,
        return_lse: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """
        Args:
            q: [T, N, L + R]: q_nope @ W_uk, then rotated q_pe.
            latent_cache: [num_blocks, block_size, L + R]; this step's rows are stored already.
        Returns:
            out: [T, N, L], softmax-weighted latents (the caller applies W_uv); 0 for rows of empty sequences.
            lse: [T, N] float32, natural log of the softmax denominator; -inf for rows of empty sequences; or None.
        """
        ...


class MlaPrefill(Protocol):
    """Non-absorbed MLA for many new tokens: K and V are up-projected from the cached latents, chunk by chunk."""

    def __call__(
        self,
        q: Tensor,
        latent_cache: Tensor,
        w_uk: Tensor,
        w_uv: Tensor,
        batch: AttentionBatch,
        softmax_scale: float,
        kv_scale: float = 1.0,
    ) -> Tensor:
        """
        Args:
            q: [T, N, P + R], rotated.
            latent_cache: [num_blocks, block_size, L + R]; this step's rows are stored already.
            w_uk: [N, P, L]. w_uv: [N, L, V].
        Returns:
            [T, N, V].
        """
        ...


class StoreKv(Protocol):
    """Write this step's keys and values into the paged cache, in place."""

    def __call__(self, k: Tensor, v: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
        """k, v: [T, num_kv_heads, head_dim]; kv_cache: [2, num_blocks, block_size, num_kv_heads, head_dim]."""
        ...


class MhaAttention(Protocol):
    """Multi-head or grouped-query attention over a paged cache, for the Llama draft."""

    def __call__(
        self,
        q: Tensor,
        kv_cache: Tensor,
        batch: AttentionBatch,
        softmax_scale: float,
        sliding_window: int | None,
    ) -> Tensor:
        """
        Args:
            q: [T, N, head_dim], rotated. kv_cache: as in `StoreKv`, N a multiple of num_kv_heads.
            sliding_window: a row at position p sees keys p - sliding_window + 1 up to p; None sees all.
        """
        ...


class RouterLogits(Protocol):
    """x @ gate.T in float32: a router's choice may hang on bits that bf16 does not have."""

    def __call__(self, x: Tensor, gate: PackedWeight) -> Tensor:
        """x: [T, H]; gate: [E, H], bf16 or float32 as the file stores it, packed by `PackLinear` -> [T, E] float32."""
        ...


class RouteExperts(Protocol):
    """DeepSeek-V3's router (report, section 2.1.2): sigmoid scores, bias for the choice only, groups, top-k."""

    def __call__(
        self,
        router_logits: Tensor,
        correction_bias: Tensor,
        *,
        top_k: int,
        num_groups: int,
        topk_groups: int,
        renormalize: bool,
        scaling_factor: float,
        slot_mapping: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """
        Args:
            router_logits: [T, E] float32. correction_bias: [E] float32.
            num_groups, topk_groups: only experts of the topk_groups best groups may be chosen; a group's score is the
                sum of its two best biased scores.
            slot_mapping: [T] int64; a row whose slot is -1 is padding and takes no expert: its ids are -1.
        Returns:
            topk_ids: [T, K] int32, best first, lowest id first among equals.
            topk_weights: [T, K] float32, unbiased scores, renormalised to sum 1 if asked, times scaling_factor.
        """
        ...


class PackExperts(Protocol):
    """Lay a layer's experts out for `MoeExperts`, at load."""

    def __call__(self, weights: ExpertWeights) -> PackedExperts: ...


class MoeExperts(Protocol):
    """Sum over a token's chosen experts of weight * down(silu(gate(x)) * up(x)), in the order of `topk_ids`."""

    def __call__(
        self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, experts: PackedExperts, first_expert: int = 0
    ) -> Tensor:
        """
        Args:
            x: [T, H]. topk_ids: [T, K] int32, global ids. topk_weights: [T, K] float32.
            first_expert: global id of the first expert held here; choices of experts held elsewhere add nothing.
        """
        ...


class SampleTokens(Protocol):
    """Draw one token a row: argmax over the processed distribution of log p(x) + gumbel(seed, i, x)
    (docs/architecture.md, "Sampling"; Gumbel coupling: Daliri et al. 2024, arXiv 2408.07978)."""

    def __call__(
        self,
        logits: Tensor,
        inputs: SamplingInputs,
        rows: SamplingRows,
        vocabulary_map: VocabularyMap | None = None,
        num_logprobs: int | None = None,
    ) -> SampleOutput:
        """
        Args:
            logits: [R, vocab_size] (or [R, num_columns] with a map) float32 or bf16; unchanged.
            num_logprobs: None: no logprobs; n: the drawn token's and the n most likely.
        """
        ...


class VerifyDraftTokens(Protocol):
    """Accept draft tokens while they equal what the target drew."""

    def __call__(
        self,
        token_ids: Tensor,
        status: Tensor,
        first_row: Tensor,
        draft_token_ids: Tensor,
        num_draft_tokens: Tensor,
    ) -> VerifyOutput:
        """
        Args:
            token_ids, status: [R], as sampled; sequence b has num_draft_tokens[b] + 1 rows, from first_row[b].
            first_row: [B] int64.
            draft_token_ids: [B, W] int32. num_draft_tokens: [B] int32, at most W.
        """
        ...
