"""`DraftGraphs`: the draft's steps, captured in two graphs without the host between two proposals.

The first extends over the rows just verified and leaves each sequence's last hidden state; the second draws all
proposals, with a single-row step between any two. Both begin with what the verify has left in the token table. A step
whose extension is too long for a bucket, as of a long prompt, runs that part eagerly and takes the second graph all
the same.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch

from kimi_backend.models.eagle3_draft import Eagle3Draft
from kimi_backend.runners.aux_buffer import AuxBuffer
from kimi_backend.runners.graphs.buckets import (
    Bucket,
    BucketChoice,
    chosen_batch_sizes,
    prompt_buckets,
    proposal_buckets,
    row_buckets,
)
from kimi_backend.runners.graphs.chunk_parts import ChunkParts, is_worth_cutting
from kimi_backend.runners.graphs.draft_inputs import (
    extension_layout,
    fill_extension,
    fill_proposals,
    pad_extension,
    pad_proposals,
    proposal_layout,
)
from kimi_backend.runners.graphs.recorder import Recorder, Run
from kimi_backend.runners.graphs.static_arrays import Arena, ArrivingWords, HostArrays, StaticArrays
from kimi_backend.runners.graphs.static_tables import StaticTables
from kimi_backend.runners.graphs.target_inputs import static_sampling_inputs
from kimi_backend.runners.hand_over.token_table import TokenTable
from kimi_backend.runners.kv_pool import KvPool
from kimi_backend.runners.metadata_builder import MetadataBuilder
from kimi_backend.runners.plan_checks import RunnerLimits, slots_needed
from kimi_backend.runners.row_arrays import RowArrays
from kimi_backend.types.plan import DraftPlan
from kimi_kernels.attention_batch import AttentionBatch, AttentionMetadata
from kimi_kernels.kernel_set import KernelSet
from kimi_kernels.sampling_inputs import SampleOutput, SamplingInputs, SamplingRows
from kimi_kernels.token_table import token_table_ops


@dataclass(frozen=True, slots=True)
class _Step:
    arrays: StaticArrays
    pad: Callable[[HostArrays], None]
    """Makes all rows and sequences padding."""
    run: Run


def _upload_padding(step: _Step) -> None:
    step.arrays.clear()
    step.pad(step.arrays.host)
    step.arrays.upload()


def _run_padding(step: _Step) -> None:
    _upload_padding(step)
    step.run()


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
        tokens: TokenTable,
    ) -> None:
        """
        Args:
            aux_buffer: where the target leaves aux hidden states, of the draft's compute dtype.
            tokens: the table that steps read tokens from and leave theirs in.
        """
        self._model, self._kernels, self._pool, self._builder = model, kernels, pool, builder
        self._recorder = recorder
        self._ops = token_table_ops(kernels)
        self._aux_buffer, self._tokens = aux_buffer, tokens
        self._max_seq_len = limits.max_model_len
        device = pool.tensor.device
        self._device = device
        most_proposals = limits.max_speculative_tokens
        sizes = chosen_batch_sizes(limits.max_num_seqs, limits.capture_batch_sizes)
        most_rows, num_heads = limits.max_num_batched_tokens, builder.num_mla_heads
        extensions = [
            *prompt_buckets(limits.max_num_seqs, most_rows, num_heads),
            *row_buckets(sizes, most_proposals + 1, most_rows),
        ]
        self._extension_layouts = {bucket: extension_layout(bucket) for bucket in extensions}
        self._proposal_layouts = {bucket: proposal_layout(bucket) for bucket in proposal_buckets(sizes, most_proposals)}
        self._extension_choice = BucketChoice(self._extension_layouts)
        self._proposal_choice = BucketChoice(self._proposal_layouts)
        self._extension_arena = Arena(self._extension_layouts.values(), device)
        self._proposal_arena = Arena(self._proposal_layouts.values(), device)
        self._tables = StaticTables(self._extension_layouts, limits, pool)
        self._uploaded = torch.cuda.Event() if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        """The end of the last upload: before it, the arrays on the host must stay as they are."""
        states = torch.zeros((2, limits.max_num_seqs, model.config.hidden_size), dtype=aux_buffer.dtype, device=device)
        self._normed, self._feedback = states
        """[max_num_seqs, H] of each sequence's last extended row."""
        self._arriving = ArrivingWords(tokens.proposed.numel(), device)
        self._extensions: dict[Bucket, _Step] = {}
        self._proposals: dict[Bucket, _Step] = {}

    @property
    def num_buckets(self) -> int:
        return len(self._extension_layouts) + len(self._proposal_layouts)

    @torch.inference_mode()
    def warm_up(self, advance: Callable[[int], None]) -> None:
        """Record every bucket, the largest first. advance: called with 1 after each."""
        extensions = {bucket: self._extension(bucket) for bucket in self._extension_layouts}
        proposals = {bucket: self._proposal(bucket) for bucket in self._proposal_layouts}
        runs = [partial(_run_padding, step) for step in (*extensions.values(), *proposals.values())]
        self._recorder.prepare(runs)
        for recorded, steps in ((self._extensions, extensions), (self._proposals, proposals)):
            for bucket, step in steps.items():
                _upload_padding(step)
                recorded[bucket] = replace(step, run=self._recorder.record(step.run))
                advance(1)

    def extension_bucket(self, plan: DraftPlan) -> Bucket | None:
        """The bucket of a checked plan's rows; None where they must run eagerly."""
        lengths = plan.rows.query_lens
        bucket = self._extension_choice.smallest(len(lengths), int(lengths.max()), len(plan.rows.token_ids))
        if bucket not in self._extensions or not is_worth_cutting(plan.rows, bucket, self._builder.num_mla_heads):
            return None
        return bucket

    def proposal_bucket(self, plan: DraftPlan) -> Bucket | None:
        """The bucket of a checked plan's proposals; None where there are none, or too many."""
        num_seqs = len(plan.num_proposals)
        bucket = self._proposal_choice.smallest(num_seqs, 1, num_seqs, int(plan.num_wanted.max()))
        return bucket if bucket in self._proposals else None

    def begin(self, plan: DraftPlan) -> None:
        """Wait, before any part of a step, until what the last one has written on the host is on the device."""
        if self._uploaded is not None:
            self._uploaded.synchronize()
        self._tables.upload(plan.rows.block_table, int(slots_needed(plan).max()))

    def extend(self, bucket: Bucket, plan: DraftPlan, region: int) -> torch.Tensor:
        """Queue the extension of a checked plan. region: of the aux buffer, which the plan's `aux_rows` count in.

        Returns:
            [S, H] of each sequence's last extended row, until the next step.
        """
        step = self._extensions[bucket]
        rows = RowArrays.of(plan.rows, self._pool.block_size)
        parts = ChunkParts.of(plan.rows, rows, bucket)
        fill_extension(step.arrays.host, plan, rows, parts, region * self._aux_buffer.rows, self._tokens.padding_row)
        if bucket.cuts_chunks:
            self._tables.upload_parts(plan.rows, parts)
        self._run(step)
        normed: torch.Tensor = self._normed[: len(plan.rows.query_lens)]
        return normed

    def take_extension(self, normed: torch.Tensor, feedback: torch.Tensor) -> None:
        """Take what `extend` would have made: [S, H] of each sequence's last extended row."""
        self._normed[: len(normed)].copy_(normed)
        self._feedback[: len(feedback)].copy_(feedback)

    def propose(self, bucket: Bucket, plan: DraftPlan) -> None:
        """Queue the draws, after `extend` or `take_extension`; they leave their tokens in the table."""
        step = self._proposals[bucket]
        fill_proposals(step.arrays.host, plan, self._tokens.padding_row)
        self._run(step)

    def send(self, bucket: Bucket, plan: DraftPlan) -> ArrivingWords:
        """Queue the copy of what `propose` has left of the plan's sequences: their rows of the table."""
        rows = self._proposals[bucket].arrays.device["table_rows"][: len(plan.table_rows)]
        self._arriving.send(self._tokens.proposed.index_select(0, rows).view(-1))
        return self._arriving

    def _run(self, step: _Step) -> None:
        step.arrays.upload()
        if self._uploaded is not None:
            self._uploaded.record()
        step.run()

    def _extension(self, bucket: Bucket) -> _Step:
        """A bucket's function, not recorded yet."""
        arrays = StaticArrays(self._extension_layouts[bucket], self._extension_arena)
        tensors = arrays.device

        def run() -> None:
            self._ops.read_drawn(tensors, self._tokens.drawn, vocab_size=self._model.config.vocab_size)
            metadata = self._metadata(bucket, tensors, tensors["part_cu_seqlens"])
            hidden = self._model.combine_aux(self._aux_buffer.all_rows[tensors["aux_rows"]])
            normed, feedback = self._forward(tensors["token_ids"], hidden, metadata)
            torch.index_select(normed, 0, tensors["last_rows"], out=self._normed[: bucket.num_seqs])
            torch.index_select(feedback, 0, tensors["last_rows"], out=self._feedback[: bucket.num_seqs])

        padding_row = self._tokens.padding_row
        return _Step(arrays, partial(pad_extension, num_rows=0, num_seqs=0, num_parts=0, padding_row=padding_row), run)

    def _proposal(self, bucket: Bucket) -> _Step:
        """A bucket's function, not recorded yet."""
        arrays = StaticArrays(self._proposal_layouts[bucket], self._proposal_arena)
        tensors, num_seqs = arrays.device, bucket.num_seqs
        sampling = static_sampling_inputs(tensors, num_seqs, self._device)
        sequence = torch.arange(num_seqs, device=self._device)
        cu_seqlens = torch.arange(num_seqs + 1, dtype=torch.int32, device=self._device)
        no_window = torch.empty((num_seqs, 0), dtype=torch.int32, device=self._device)
        no_window_len = torch.zeros(num_seqs, dtype=torch.int32, device=self._device)

        def run() -> None:
            table = self._tables.of(bucket)
            self._ops.plan_steps(tensors, table, self._tokens.drawn, block_size=self._pool.block_size)
            normed, hidden = self._normed[:num_seqs], self._feedback[:num_seqs]
            drawn: list[SampleOutput] = []
            for step in range(bucket.num_proposals):
                if step:
                    rows_of_step = {name: tensors[name][step - 1] for name in ("seq_lens", "positions", "slots")}
                    metadata = self._metadata(bucket, rows_of_step, cu_seqlens)
                    # A failed draw has no token; any will do for rows that no one reads.
                    token_ids = drawn[-1].token_ids.clamp(0, self._model.config.vocab_size - 1)
                    normed, hidden = self._forward(token_ids, hidden, metadata)
                rows = SamplingRows(
                    sequence=sequence,
                    token_index=tensors["token_index"][step],
                    window_token_ids=no_window,
                    window_len=no_window_len,
                )
                drawn.append(self._draw(normed, sampling, rows))
            token_ids, status = torch.stack([d.token_ids for d in drawn]), torch.stack([d.status for d in drawn])
            self._ops.store_proposals(token_ids, status, tensors, self._tokens.proposed)

        return _Step(arrays, partial(pad_proposals, num_seqs=0, padding_row=self._tokens.padding_row), run)

    def _metadata(
        self, bucket: Bucket, tensors: dict[str, torch.Tensor], cu_seqlens: torch.Tensor
    ) -> AttentionMetadata:
        batch = AttentionBatch(
            cu_seqlens_q=cu_seqlens,
            seq_lens=tensors["seq_lens"],
            block_table=self._tables.of(bucket),
            num_tokens=bucket.num_rows,
            max_query_len=bucket.query_len,
            max_seq_len=self._max_seq_len,
        )
        return AttentionMetadata(
            positions=tensors["positions"],
            slot_mapping=tensors["slots"],
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
