"""`DraftGraphs`: the draft's steps, captured in two graphs without the host between two proposals.

The first extends over the rows just verified and leaves each sequence's last hidden state; the second draws all
proposals, with a single-row step between any two. A step whose extension is too long for a bucket, as at the end of a
prompt, runs that part as it comes and takes the second graph all the same.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch

from kimi_backend.models.eagle3_draft import Eagle3Draft
from kimi_backend.runners.aux_buffer import AuxBuffer
from kimi_backend.runners.graphs.buckets import Bucket, BucketChoice, chosen_batch_sizes, proposal_buckets, row_buckets
from kimi_backend.runners.graphs.draft_inputs import (
    extension_layout,
    fill_extension,
    fill_proposals,
    pad_extension,
    pad_proposals,
    proposal_layout,
)
from kimi_backend.runners.graphs.follow_inputs import (
    fill_following_extension,
    fill_following_proposals,
)
from kimi_backend.runners.graphs.recorder import Recorder, Run
from kimi_backend.runners.graphs.static_arrays import Arena, HostArrays, StaticArrays, StaticBlockTable, StaticResults
from kimi_backend.runners.graphs.target_inputs import static_sampling_inputs
from kimi_backend.runners.kv_pool import KvPool
from kimi_backend.runners.left_tokens import left_shape
from kimi_backend.runners.metadata_builder import MetadataBuilder
from kimi_backend.runners.plan_checks import RunnerLimits, slots_needed
from kimi_backend.runners.row_arrays import RowArrays
from kimi_backend.types.plan import PLACEHOLDER_TOKEN_ID, DraftPlan, FollowPlan, Int32Array, Int64Array
from kimi_kernels.attention_batch import AttentionBatch, AttentionMetadata
from kimi_kernels.draft_steps import draft_step_ops
from kimi_kernels.kernel_set import KernelSet
from kimi_kernels.sampling_inputs import STATUS_OK, SampleOutput, SamplingInputs, SamplingRows

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class _Step:
    arrays: StaticArrays
    pad: Callable[[HostArrays], None]
    """Makes all rows and sequences padding."""
    run: Run


def _run_padding(step: _Step) -> None:
    step.pad(step.arrays.host)
    step.arrays.upload()
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
    ) -> None:
        """aux_buffer: where the target leaves aux hidden states, of the draft's compute dtype."""
        self._model, self._kernels, self._pool, self._builder = model, kernels, pool, builder
        self._recorder = recorder
        self._ops = draft_step_ops(kernels)
        self._aux_buffer = aux_buffer
        self._max_seq_len = limits.max_model_len
        device = pool.tensor.device
        self._device = device
        most_proposals = limits.max_speculative_tokens
        sizes = chosen_batch_sizes(limits.max_num_seqs, limits.capture_batch_sizes)
        self._extension_layouts = {
            bucket: extension_layout(bucket)
            for bucket in row_buckets(sizes, most_proposals + 1, limits.max_num_batched_tokens)
        }
        self._proposal_layouts = {bucket: proposal_layout(bucket) for bucket in proposal_buckets(sizes, most_proposals)}
        self._extension_choice = BucketChoice(self._extension_layouts)
        self._proposal_choice = BucketChoice(self._proposal_layouts)
        self._extension_arena = Arena(self._extension_layouts.values(), device)
        self._proposal_arena = Arena(self._proposal_layouts.values(), device)
        num_columns = -(-limits.max_model_len // pool.block_size)
        self._table = StaticBlockTable(limits.max_num_seqs, num_columns, device)
        self._results = StaticResults(3 * limits.max_num_seqs * most_proposals, device)
        self.left = torch.full(left_shape(limits), PLACEHOLDER_TOKEN_ID, dtype=torch.int32, device=device)
        """[1 + longest proposal, max_num_seqs] what the last proposals left for the target, see `left_tokens`."""
        self._uploaded = torch.cuda.Event() if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        """After the last upload: before it, the arrays on the host must stay as they are."""
        states = torch.zeros((2, limits.max_num_seqs, model.config.hidden_size), dtype=aux_buffer.dtype, device=device)
        self._normed, self._feedback = states
        """[max_num_seqs, H] of each sequence's last extended row."""
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
        first = next(iter(extensions.values()))
        by_draws = {bucket.num_proposals: step for bucket, step in proposals.items()}
        runs = [partial(_run_padding, step) for step in (*extensions.values(), *proposals.values())]
        self._recorder.prepare([*runs, *(partial(self._follow_nothing, first, step) for step in by_draws.values())])
        for recorded, steps in ((self._extensions, extensions), (self._proposals, proposals)):
            for bucket, step in steps.items():
                step.pad(step.arrays.host)
                step.arrays.upload()
                recorded[bucket] = replace(step, run=self._recorder.record(step.run))
                advance(1)

    def _follow_nothing(self, extension: _Step, proposal: _Step) -> None:
        """What `follow` runs beside the two steps, of padding."""
        for step, names in (
            (extension, ("drawn_places", "drawn_rows")),
            (proposal, ("first_len", "first_index", "most", "room", "drawn_rows")),
        ):
            for name in names:
                step.arrays.host[name][:] = 0
            step.pad(step.arrays.host)
            step.arrays.upload()
        drawn = torch.zeros((1, 1), dtype=torch.int64, device=self._device)
        accepted = torch.zeros(1, dtype=torch.int32, device=self._device)
        self._correct(extension.arrays, proposal.arrays, drawn, accepted)

    def _correct(
        self, extension: StaticArrays, proposals: StaticArrays, drawn: torch.Tensor, accepted: torch.Tensor
    ) -> None:
        self._ops.follow_verify(
            extension.device,
            proposals.device,
            self._table.tensor[: proposals.device["first_len"].shape[0]],
            drawn,
            accepted,
            block_size=self._pool.block_size,
            vocab_size=self._model.config.vocab_size,
        )

    def extension_bucket(self, plan: DraftPlan) -> Bucket | None:
        """The bucket of a checked plan's rows; None where they must run as they come."""
        lengths = plan.rows.query_lens
        bucket = self._extension_choice.smallest(len(lengths), int(lengths.max()), len(plan.rows.token_ids))
        return bucket if bucket in self._extensions else None

    def proposal_bucket(self, plan: DraftPlan) -> Bucket | None:
        """The bucket of a checked plan's proposals; None where there are none, or too many."""
        num_seqs = len(plan.num_proposals)
        bucket = self._proposal_choice.smallest(num_seqs, 1, num_seqs, int(plan.num_proposals.max()))
        return bucket if bucket in self._proposals else None

    def extend(self, bucket: Bucket, plan: DraftPlan, region: int) -> None:
        """Queue the extension of a checked plan. region: of the aux buffer, which the plan's `aux_rows` count in."""
        self._wait_for_upload()
        arrays = self._extensions[bucket].arrays
        rows = RowArrays.of(plan.rows, self._pool.block_size)
        fill_extension(arrays.host, plan, rows, region * self._aux_buffer.rows)
        self._upload_table(plan)
        arrays.upload()
        self._extensions[bucket].run()

    def only_extend(self, bucket: Bucket, plan: DraftPlan, region: int) -> torch.Tensor:
        """`extend`, with no draws behind it: [S, H] of each sequence's last extended row, until the next step."""
        self.extend(bucket, plan, region)
        if self._uploaded is not None:
            self._uploaded.record()
        normed: torch.Tensor = self._normed[: len(plan.rows.query_lens)]
        return normed

    def take_extension(self, normed: torch.Tensor, feedback: torch.Tensor) -> None:
        """In place of `extend`: [S, H] of each sequence's last extended row."""
        self._normed[: len(normed)].copy_(normed)
        self._feedback[: len(feedback)].copy_(feedback)

    def propose(self, bucket: Bucket, plan: DraftPlan) -> None:
        """Queue the draws, after `extend` or `take_extension`; they leave their tokens in `left` too."""
        self._wait_for_upload()
        arrays = self._proposals[bucket].arrays
        fill_proposals(arrays.host, plan, self._pool.block_size)
        self._upload_table(plan)
        arrays.upload()
        if self._uploaded is not None:
            self._uploaded.record()
        self._proposals[bucket].run()

    def follow(self, extension: Bucket, proposal: Bucket, plan: DraftPlan, follow: FollowPlan, region: int) -> None:
        """Queue both steps of a checked plan behind the verify that they follow, as `extend` and `propose` do."""
        self._wait_for_upload()
        drawn, accepted = follow.drawn.output_token_ids, follow.drawn.num_accepted_tokens
        assert drawn is not None
        assert accepted is not None
        rows, proposing = self._extensions[extension].arrays, self._proposals[proposal].arrays
        first_aux_row = region * self._aux_buffer.rows
        row_arrays = RowArrays.of(plan.rows, self._pool.block_size)
        fill_following_extension(rows.host, plan, follow, row_arrays, first_aux_row, drawn.shape[1])
        fill_following_proposals(proposing.host, plan, follow)
        self._upload_table(plan)
        rows.upload()
        proposing.upload()
        if self._uploaded is not None:
            self._uploaded.record()
        self._correct(rows, proposing, drawn, accepted)
        self._extensions[extension].run()
        self._proposals[proposal].run()

    def drawn(self, bucket: Bucket, plan: DraftPlan) -> tuple[Int64Array, Int32Array]:
        """What `propose` drew; waits for the device.

        Returns:
            draft_token_ids: [number of proposing sequences, W]. seq_status: [S]. As in `DraftReply`.
        """
        size = bucket.num_proposals * bucket.num_seqs
        words = self._results.fetch(3 * size)
        drawn = words[: 2 * size].view(np.int64).reshape(bucket.num_proposals, bucket.num_seqs)
        return _wanted(plan, drawn, words[2 * size :].reshape(drawn.shape))

    def _wait_for_upload(self) -> None:
        if self._uploaded is not None:
            self._uploaded.synchronize()

    def _upload_table(self, plan: DraftPlan) -> None:
        longest = int(slots_needed(plan).max())
        self._table.upload(plan.rows.block_table, -(-longest // self._pool.block_size))

    def _extension(self, bucket: Bucket) -> _Step:
        """A bucket's function, not recorded yet."""
        arrays = StaticArrays(self._extension_layouts[bucket], self._extension_arena)
        tensors = arrays.device

        def run() -> None:
            metadata = self._metadata(bucket, tensors, tensors["cu_seqlens"])
            hidden = self._model.combine_aux(self._aux_buffer.all_rows[tensors["aux_rows"]])
            normed, feedback = self._forward(tensors["token_ids"], hidden, metadata)
            torch.index_select(normed, 0, tensors["last_rows"], out=self._normed[: bucket.num_seqs])
            torch.index_select(feedback, 0, tensors["last_rows"], out=self._feedback[: bucket.num_seqs])

        return _Step(arrays, partial(pad_extension, num_rows=0, num_seqs=0), run)

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
            self._results.store([*(each.token_ids for each in drawn), *(each.status for each in drawn)])
            self._leave(bucket, tensors)

        return _Step(arrays, partial(pad_proposals, num_seqs=0), run)

    def leave(self, status: torch.Tensor, proposing: torch.Tensor, token_ids: torch.Tensor | None) -> None:
        """Into `left`, what a step that ran as it came has drawn.

        Args:
            status: [S] int32.
            proposing: [B] int64, which of the S sequences propose.
            token_ids: [B, W] int64, placeholders where none is wanted; None where nobody proposes.
        """
        self.left[0, : len(status)] = status
        if token_ids is not None:
            kept = token_ids.masked_fill((status[proposing] != STATUS_OK)[:, None], PLACEHOLDER_TOKEN_ID)
            self.left[1 : 1 + token_ids.shape[1], proposing] = kept.T.to(torch.int32)

    def _leave(self, bucket: Bucket, tensors: Tensors) -> None:
        """The stored draws to `left`: what `_wanted` keeps of them, but nothing of a sequence that failed."""
        size, shape = bucket.num_proposals * bucket.num_seqs, (bucket.num_proposals, bucket.num_seqs)
        words = self._results.words[: 3 * size]
        drawn, status = words[: 2 * size].view(torch.int64).view(shape), words[2 * size :].view(shape)
        self._ops.leave_tokens(drawn, status, tensors["is_wanted"], tensors["counts"], self.left)

    def _metadata(self, bucket: Bucket, tensors: Tensors, cu_seqlens: torch.Tensor) -> AttentionMetadata:
        batch = AttentionBatch(
            cu_seqlens_q=cu_seqlens,
            seq_lens=tensors["seq_lens"],
            block_table=self._table.tensor[: bucket.num_seqs],
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


def _wanted(plan: DraftPlan, drawn: Int64Array, status: Int32Array) -> tuple[Int64Array, Int32Array]:
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
