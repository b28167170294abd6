"""`DraftGraphs`: the draft's steps, captured: the extension over the rows just verified and all single-row steps in one
graph, without the host between two proposals."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from kimi_backend.models.eagle3_draft import Eagle3Draft
from kimi_backend.runners.aux_buffer import AuxBuffer
from kimi_backend.runners.graphs.buckets import Bucket, draft_buckets, smallest_fitting
from kimi_backend.runners.graphs.draft_inputs import draft_layout, fill_draft, pad_draft
from kimi_backend.runners.graphs.recorder import Recorder, Run
from kimi_backend.runners.graphs.static_arrays import Arena, StaticArrays, StaticBlockTable, StaticResults
from kimi_backend.runners.graphs.target_inputs import static_sampling_inputs
from kimi_backend.runners.kv_pool import KvPool
from kimi_backend.runners.metadata_builder import MetadataBuilder
from kimi_backend.runners.plan_checks import RunnerLimits
from kimi_backend.runners.row_arrays import RowArrays
from kimi_backend.types.plan import PLACEHOLDER_TOKEN_ID, DraftPlan, Int32Array, Int64Array
from kimi_kernels.attention_batch import AttentionBatch, AttentionMetadata
from kimi_kernels.kernel_set import KernelSet
from kimi_kernels.sampling_inputs import STATUS_OK, SampleOutput, SamplingInputs, SamplingRows

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class _Step:
    arrays: StaticArrays
    run: Run


class DraftGraphs:
    """Captured steps of one draft."""

    def __init__(
        self,
        model: Eagle3Draft,
        kernels: KernelSet,
        pool: KvPool,
        limits: RunnerLimits,
        builder: MetadataBuilder,
        recorder: Recorder,
        aux_buffer: AuxBuffer,
    ) -> None:
        """
        Args:
            aux_buffer: where the target leaves aux hidden states, of the draft's compute dtype.
        """
        self._model, self._kernels, self._pool, self._builder = model, kernels, pool, builder
        self._recorder = recorder
        self._aux_buffer = aux_buffer
        self._max_seq_len = limits.max_model_len
        device = pool.tensor.device
        self._device = device
        self._buckets = draft_buckets(limits.max_num_seqs, limits.max_speculative_tokens, limits.max_num_batched_tokens)
        self._layouts = {bucket: draft_layout(bucket) for bucket in self._buckets}
        self._arena = Arena(self._layouts.values(), device)
        num_columns = -(-limits.max_model_len // pool.block_size)
        self._table = StaticBlockTable(limits.max_num_seqs, num_columns, device)
        self._results = StaticResults(3 * max(b.num_seqs * b.num_proposals for b in self._buckets), device)
        self._steps: dict[Bucket, _Step] = {}

    @property
    def num_buckets(self) -> int:
        return len(self._buckets)

    @torch.inference_mode()
    def warm_up(self, advance: Callable[[int], None]) -> None:
        """Record every bucket, the largest first. advance: called with 1 after each."""
        for bucket in self._buckets:
            self._steps[bucket] = self._record(bucket)
            advance(1)

    def bucket_of(self, plan: DraftPlan) -> Bucket | None:
        """The bucket of a checked plan; None where it must run eagerly: a long chunk, or nothing to propose."""
        lengths = plan.rows.query_lens
        return smallest_fitting(
            self._steps, len(lengths), int(lengths.max()), len(plan.rows.token_ids), int(plan.num_proposals.max())
        )

    def run(self, bucket: Bucket, plan: DraftPlan, region: int) -> tuple[Int64Array, Int32Array]:
        """Run a checked plan; waits for the device.

        Args:
            region: of the aux buffer, which the plan's `aux_rows` count in.
        Returns:
            draft_token_ids: [number of proposing sequences, W]. seq_status: [S]. As in `DraftReply`.
        """
        arrays, block_size = self._steps[bucket].arrays, self._pool.block_size
        first_aux_row = region * self._aux_buffer.rows
        fill_draft(arrays.host, plan, RowArrays.of(plan.rows, block_size), block_size, first_aux_row)
        longest = int((plan.rows.seq_lens + np.maximum(plan.num_proposals - 1, 0)).max())
        self._table.upload(plan.rows.block_table, -(-longest // block_size))
        arrays.upload()
        self._steps[bucket].run()
        size = bucket.num_proposals * bucket.num_seqs
        words = self._results.fetch(3 * size)
        drawn = words[: 2 * size].view(np.int64).reshape(bucket.num_proposals, bucket.num_seqs)
        status = words[2 * size :].reshape(bucket.num_proposals, bucket.num_seqs)
        return _proposals(plan, drawn, status)

    def _record(self, bucket: Bucket) -> _Step:
        arrays = StaticArrays(self._layouts[bucket], self._arena)
        arrays.host["cu_seqlens"][0] = 0
        pad_draft(arrays.host, 0, 0)
        arrays.upload()
        sampling = static_sampling_inputs(arrays.device, bucket.num_seqs, self._device)
        sequence = torch.arange(bucket.num_seqs, device=self._device)
        single_rows = torch.arange(bucket.num_seqs + 1, dtype=torch.int32, device=self._device)
        no_window = torch.empty((bucket.num_seqs, 0), dtype=torch.int32, device=self._device)
        no_window_len = torch.zeros(bucket.num_seqs, dtype=torch.int32, device=self._device)

        def run() -> None:
            tensors = arrays.device
            normed, hidden = self._extend(bucket, tensors)
            drawn: list[SampleOutput] = []
            for step in range(bucket.num_proposals):
                if step:
                    metadata = self._single_row_metadata(bucket, tensors, single_rows, step)
                    # A failed draw has no token; any will do for rows that no one reads.
                    token_ids = drawn[-1].token_ids.clamp(min=0)
                    normed, hidden = self._forward(token_ids, hidden, metadata)
                rows = SamplingRows(
                    sequence=sequence,
                    token_index=tensors["token_index"][step],
                    window_token_ids=no_window,
                    window_len=no_window_len,
                )
                drawn.append(self._draw(normed, sampling, rows))
            self._results.store([*(d.token_ids for d in drawn), *(d.status for d in drawn)])

        return _Step(arrays, self._recorder.record(run))

    def _extend(self, bucket: Bucket, tensors: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
        """(normed, feedback) of each sequence's last row."""
        batch = AttentionBatch(
            cu_seqlens_q=tensors["cu_seqlens"],
            seq_lens=tensors["seq_lens"],
            block_table=self._table.tensor[: bucket.num_seqs],
            num_tokens=bucket.num_rows,
            max_query_len=bucket.query_len,
            max_seq_len=self._max_seq_len,
        )
        metadata = AttentionMetadata(
            positions=tensors["positions"],
            slot_mapping=tensors["slots"],
            decode=self._builder.planned(batch),
            prefill=None,
        )
        hidden = self._model.combine_aux(self._aux_buffer.all_rows[tensors["aux_rows"]])
        normed, feedback = self._forward(tensors["token_ids"], hidden, metadata)
        return normed[tensors["last_rows"]], feedback[tensors["last_rows"]]

    def _single_row_metadata(
        self, bucket: Bucket, tensors: Tensors, cu_seqlens: torch.Tensor, step: int
    ) -> AttentionMetadata:
        batch = AttentionBatch(
            cu_seqlens_q=cu_seqlens,
            seq_lens=tensors["step_seq_lens"][step - 1],
            block_table=self._table.tensor[: bucket.num_seqs],
            num_tokens=bucket.num_seqs,
            max_query_len=1,
            max_seq_len=self._max_seq_len,
        )
        return AttentionMetadata(
            positions=tensors["step_positions"][step - 1],
            slot_mapping=tensors["step_slots"][step - 1],
            decode=self._builder.planned(batch),
            prefill=None,
        )

    def _forward(
        self, token_ids: torch.Tensor, hidden: torch.Tensor, metadata: AttentionMetadata
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self._model.forward(token_ids, hidden, metadata, self._pool.tensor, self._pool.scale)

    def _draw(self, normed: torch.Tensor, sampling: SamplingInputs, rows: SamplingRows) -> SampleOutput:
        logits = self._model.compute_logits(normed)
        return self._kernels.sample_tokens(logits, sampling, rows, self._model.vocabulary_map)


def _proposals(plan: DraftPlan, drawn: Int64Array, status: Int32Array) -> tuple[Int64Array, Int32Array]:
    """Drop what nobody asked for, and all after a failure.

    Args:
        drawn, status: [k, at least S].
    """
    wanted = plan.num_proposals
    step = np.arange(len(drawn))[:, None]
    # The first draw tells whether the extension was finite, of sequences that propose nothing too.
    counts = (step < np.maximum(wanted, 1)) & (status[:, : len(wanted)] != STATUS_OK)
    failed_at = np.where(counts.any(axis=0), counts.argmax(axis=0), len(drawn))
    seq_status = np.where(counts.any(axis=0), status[np.minimum(failed_at, len(drawn) - 1), np.arange(len(wanted))], 0)
    is_kept = (step < wanted) & (step < failed_at)
    token_ids: Int64Array = np.where(is_kept, drawn[:, : len(wanted)], PLACEHOLDER_TOKEN_ID)
    return token_ids.T[wanted > 0], seq_status.astype(np.int32)
