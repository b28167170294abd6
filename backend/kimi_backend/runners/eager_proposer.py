"""Proposals drawn step by step, each kernel launched eagerly: on a CPU, and for draws no captured step holds."""

from dataclasses import dataclass

import torch

from kimi_backend.models.eagle3_draft import Eagle3Draft
from kimi_backend.runners.kv_pool import KvPool
from kimi_backend.runners.metadata_builder import MetadataBuilder
from kimi_backend.runners.sampling_tensors import SamplingUpload
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
    """The inputs of the single-row steps of B sequences; W proposals at most."""

    num_proposals: torch.Tensor
    """[B] int32."""
    seq_lens: torch.Tensor
    """[B] int32, draft KV length after the extension."""
    block_table: torch.Tensor
    """[B, max_blocks] int32."""
    output_index: torch.Tensor
    """[B] int64, index of the first token proposed."""
    sampling: SamplingInputs
    """The sampling of the sequences that propose."""
    sequence: torch.Tensor
    """[B] int64: 0, 1, …"""
    wants_alike: bool
    """All want W proposals."""
    reads_window: bool
    """Some processor looks at the proposals before."""
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
        self,
        plan: DraftPlan,
        tensors: Tensors,
        upload: SamplingUpload,
        normed: torch.Tensor,
        hidden: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """W draws with a single-row step between any two.

        A sequence that wants fewer proposals stays in the batch, so that shapes do not change from step to step: its
        rows write nothing, see only slots it owns, and what they draw is dropped.

        Args:
            plan: one that is `resolved`, of which some proposal is wanted.
            tensors: the plan's arrays by name, `num_wanted` as `num_proposals`, and `proposing`: [B] which of its
                sequences propose.
            upload: what brings the plan's sampling parameters to the device.
            normed, hidden: [B, H] of their last extended rows.
        Returns:
            token_ids: [B, W] int64, PLACEHOLDER_TOKEN_ID after each sequence's proposals.
            status: [B] int32, the first failure among them.
        """
        work = _proposing(plan, tensors, upload)
        window = torch.zeros((len(work.sequence), work.width), dtype=torch.int32, device=hidden.device)
        token_ids, status = [], []
        for step in range(work.width):
            drawn, drawn_status = self._draw(work, normed, window, step)
            token_ids.append(drawn)
            status.append(drawn_status)
            if step + 1 < work.width:
                # A failed draw has no token; any will do for rows that no one reads.
                token = drawn.clamp(min=0)
                if work.reads_window:
                    window[:, step] = token
                normed, hidden = self._single_step(work, token, hidden, step + 1)
        return _until_failure(torch.stack(token_ids, 1), torch.stack(status, 1), work)

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
        is_wanted, last = None, work.seq_lens + step
        if not work.wants_alike:
            is_wanted = step < work.num_proposals
            last = torch.minimum(last, work.seq_lens + (work.num_proposals - 1))
        metadata = self._builder.build_single_rows(last, work.block_table, is_wanted, work.max_seq_len + step)
        return self._model.forward(token_ids, hidden, metadata, self._pool.tensor, self._pool.scale)


def _until_failure(
    token_ids: torch.Tensor, status: torch.Tensor, work: _Proposing
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what `EagerProposer.propose` does, from what was drawn: both [B, W]."""
    if status.device.type == "cpu" and work.wants_alike and not status.any():
        return token_ids, status[:, 0]
    has_failed = status != STATUS_OK
    if not work.wants_alike:
        has_failed &= torch.arange(work.width, device=status.device) < work.num_proposals[:, None]
    is_lost = has_failed.cumsum(1) > 0
    first_status = status.gather(1, has_failed.int().argmax(1, keepdim=True))[:, 0]
    first_status = first_status.masked_fill(~is_lost[:, -1], STATUS_OK)
    if not work.wants_alike:
        is_lost |= torch.arange(work.width, device=status.device) >= work.num_proposals[:, None]
    return token_ids.masked_fill(is_lost, PLACEHOLDER_TOKEN_ID), first_status


def _proposing(plan: DraftPlan, tensors: Tensors, upload: SamplingUpload) -> _Proposing:
    proposing, wanted = tensors["proposing"], plan.num_wanted[plan.num_proposals > 0]
    everyone = len(proposing) == len(plan.num_proposals)
    names = ("num_proposals", "seq_lens", "block_table")
    moves_logits = upload.moves_logits(plan.sampling)
    is_greedy = plan.sampling.temperature < GREEDY_TEMPERATURE
    return _Proposing(
        **{name: tensors[name] if everyone else tensors[name][proposing] for name in names},
        output_index=tensors["output_index"],
        sampling=upload.inputs(plan.sampling),
        sequence=torch.arange(len(proposing), device=proposing.device),
        wants_alike=bool((wanted == wanted.max()).all()),
        reads_window=moves_logits,
        takes_argmax=bool(is_greedy.all()) and not moves_logits,
        width=int(wanted.max()),
        max_seq_len=int(plan.rows.seq_lens.max()),
    )
