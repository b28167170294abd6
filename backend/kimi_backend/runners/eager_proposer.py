"""Proposals drawn step by step, each kernel launched as it comes: on a CPU, and for draws no captured step holds."""

from dataclasses import dataclass, replace

import torch

from kimi_backend.models.eagle3_draft import Eagle3Draft
from kimi_backend.runners.kv_pool import KvPool
from kimi_backend.runners.metadata_builder import MetadataBuilder
from kimi_backend.runners.sampling_tensors import has_processors, sampling_inputs
from kimi_backend.types.plan import DraftPlan
from kimi_kernels.kernel_set import KernelSet
from kimi_kernels.sampling_inputs import (
    GREEDY_TEMPERATURE,
    PLACEHOLDER_TOKEN_ID,
    STATUS_NOT_FINITE,
    STATUS_OK,
    SamplingInputs,
    SamplingRows,
)

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Proposing:
    """What the single-row steps of B sequences work on; W proposals at most."""

    num_proposals: torch.Tensor
    """[B] int32."""
    seq_lens: torch.Tensor
    """[B] int32, draft KV length after the extension."""
    block_table: torch.Tensor
    """[B, max_blocks] int32."""
    output_index: torch.Tensor
    """[B] int64, index of the first token proposed."""
    sampling: SamplingInputs
    sequence: torch.Tensor
    """[B] int64: 0, 1, …"""
    takes_argmax: bool
    """Every sequence is greedy and no processor moves a logit, so logits need not be gathered over ranks."""
    width: int
    """W."""
    max_seq_len: int
    """Upper bound of seq_lens."""


class EagerProposer:
    """The single-row steps of one draft."""

    def __init__(self, model: Eagle3Draft, kernels: KernelSet, pool: KvPool, builder: MetadataBuilder) -> None:
        self._model, self._kernels, self._pool, self._builder = model, kernels, pool, builder

    def propose(
        self, plan: DraftPlan, tensors: Tensors, normed: torch.Tensor, hidden: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """W draws with a single-row step between any two.

        A sequence that wants fewer proposals stays in the batch, so that shapes do not change from step to step: its
        rows write nothing, see only slots it owns, and what they draw is dropped.

        Args:
            tensors: the plan's arrays by name, and `proposing`: [B] which of its sequences propose.
            normed, hidden: [B, H] of their last extended rows.
        Returns:
            token_ids: [B, W] int64, PLACEHOLDER_TOKEN_ID after each sequence's proposals.
            status: [B] int32, the first failure among them.
        """
        work = _proposing(plan, tensors)
        num_sequences = len(work.sequence)
        window = torch.zeros((num_sequences, work.width), dtype=torch.int32, device=hidden.device)
        token_ids = torch.full_like(window, PLACEHOLDER_TOKEN_ID, dtype=torch.int64)
        status = torch.full_like(work.num_proposals, STATUS_OK)
        for step in range(work.width):
            drawn, drawn_status = self._draw(work, normed, window, step)
            is_wanted = step < work.num_proposals
            status = torch.where(is_wanted & (status == STATUS_OK), drawn_status, status)
            token_ids[:, step] = torch.where(is_wanted & (status == STATUS_OK), drawn, PLACEHOLDER_TOKEN_ID)
            # A failed draw has no token; any will do for rows that no one reads.
            window[:, step] = drawn.clamp(min=0)
            if step + 1 < work.width:
                normed, hidden = self._single_step(work, window[:, step], hidden, step + 1)
        return token_ids, status

    def _draw(
        self, work: _Proposing, normed: torch.Tensor, window: torch.Tensor, step: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(token ids [B] int64, status [B] int32) of proposal number `step`."""
        if work.takes_argmax:
            values, token_ids = self._model.argmax(normed)
            is_finite = values.isfinite()
            status = torch.where(is_finite, STATUS_OK, STATUS_NOT_FINITE).to(torch.int32)
            return token_ids.masked_fill(~is_finite, PLACEHOLDER_TOKEN_ID), status
        rows = SamplingRows(
            sequence=work.sequence,
            token_index=work.output_index + step,
            window_token_ids=window,
            window_len=torch.full_like(work.num_proposals, step),
        )
        logits = self._model.compute_logits(normed)
        drawn = self._kernels.sample_tokens(logits, work.sampling, rows, self._model.vocabulary_map)
        return drawn.token_ids, drawn.status

    def _single_step(
        self, work: _Proposing, token_ids: torch.Tensor, hidden: torch.Tensor, step: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Row `seq_len + step - 1` of each sequence, which reads the hidden state of the row before."""
        is_wanted = step < work.num_proposals
        last = torch.minimum(work.seq_lens + step, work.seq_lens + (work.num_proposals - 1))
        metadata = self._builder.build_single_rows(last, work.block_table, is_wanted, work.max_seq_len + step)
        return self._model.forward(token_ids, hidden, metadata, self._pool.tensor, self._pool.scale)


def _proposing(plan: DraftPlan, tensors: Tensors) -> _Proposing:
    proposing = tensors["proposing"]
    sampling = sampling_inputs(tensors)
    is_greedy = plan.greedy | (plan.sampling.temperature < GREEDY_TEMPERATURE)
    greedy_temperature = sampling.temperature.masked_fill(tensors["greedy"], 0.0)
    return _Proposing(
        num_proposals=tensors["num_proposals"][proposing],
        seq_lens=tensors["seq_lens"][proposing],
        block_table=tensors["block_table"][proposing],
        output_index=tensors["output_index"],
        sampling=replace(sampling, temperature=greedy_temperature),
        sequence=torch.arange(len(proposing), device=proposing.device),
        takes_argmax=bool(is_greedy.all()) and not has_processors(plan.sampling),
        width=int(plan.num_proposals.max()),
        max_seq_len=int(plan.rows.seq_lens.max()),
    )
