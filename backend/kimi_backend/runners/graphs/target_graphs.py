"""`TargetGraphs`: the target's verify steps, captured.

A step is two graphs. The first runs the layers, leaves aux hidden states in the buffer and the normed hidden states in
a tensor of their own; the second makes logits, rules out what masks do, draws and verifies. Between them the masks of
the rows that have one are uploaded, if any row has. A step whose draws want what no graph holds (penalties, bans,
log-probabilities) takes the first graph only.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from kimi_backend.models.kimi_k25 import KimiTarget
from kimi_backend.runners.aux_buffer import AuxBuffer
from kimi_backend.runners.graphs.buckets import Bucket, BucketChoice, chosen_batch_sizes, row_buckets
from kimi_backend.runners.graphs.recorder import Recorder, Run
from kimi_backend.runners.graphs.static_arrays import (
    Arena,
    ArrivingWords,
    StaticArrays,
    StaticBlockTable,
    StaticMasks,
    StaticResults,
)
from kimi_backend.runners.graphs.target_inputs import (
    fill_target,
    pad_target,
    static_sampling_inputs,
    target_layout,
)
from kimi_backend.runners.hand_over.token_table import TokenTable
from kimi_backend.runners.host_transfer import Arrays
from kimi_backend.runners.kv_pool import KvPool
from kimi_backend.runners.metadata_builder import MetadataBuilder
from kimi_backend.runners.plan_checks import RunnerLimits
from kimi_backend.runners.row_arrays import RowArrays
from kimi_backend.runners.sampled_rows import SampledRows
from kimi_backend.types.plan import Int32Array, TargetPlan
from kimi_kernels.attention_batch import AttentionBatch, AttentionMetadata
from kimi_kernels.kernel_set import KernelSet
from kimi_kernels.sampling_inputs import SamplingRows
from kimi_kernels.token_table import token_table_ops


@dataclass(frozen=True, slots=True)
class _Step:
    """A bucket's arrays and its two halves."""

    arrays: StaticArrays
    forward: Run
    sample: Run


class TargetGraphs:
    """Captured verify steps of one target."""

    def __init__(
        self,
        model: KimiTarget,
        kernels: KernelSet,
        pool: KvPool,
        limits: RunnerLimits,
        builder: MetadataBuilder,
        recorder: Recorder,
        aux_layer_ids: tuple[int, ...],
        aux_buffer: AuxBuffer | None,
        tokens: TokenTable,
    ) -> None:
        """
        Args:
            aux_buffer: where every step leaves its aux hidden states; None without a draft.
            tokens: the table that steps read tokens from and leave theirs in.
        """
        self._model, self._kernels, self._pool, self._builder = model, kernels, pool, builder
        self._recorder = recorder
        self._aux_layer_ids = aux_layer_ids
        self._aux_buffer, self._tokens = aux_buffer, tokens
        self._ops = token_table_ops(kernels)
        self._max_seq_len = limits.max_model_len
        device = pool.tensor.device
        self._device = device
        sizes = chosen_batch_sizes(limits.max_num_seqs, limits.capture_batch_sizes)
        self._buckets = row_buckets(sizes, limits.max_speculative_tokens + 1, limits.max_num_batched_tokens)
        self._choice = BucketChoice(self._buckets)
        self._layouts = {bucket: target_layout(bucket) for bucket in self._buckets}
        self._arena = Arena(self._layouts.values(), device)
        num_columns = -(-limits.max_model_len // pool.block_size)
        self._table = StaticBlockTable(limits.max_num_seqs, num_columns, device)
        most_rows = max(bucket.num_rows for bucket in self._buckets)
        self.hidden = torch.zeros((most_rows, model.config.hidden_size), dtype=model.dtype, device=device)
        """[most rows of a bucket, hidden_size] normed hidden states of the last step's rows, in its order."""
        most_tokens = max(bucket.num_seqs * bucket.query_len for bucket in self._buckets)
        self._token_ids, self._window = torch.zeros((2, most_tokens), dtype=torch.int32, device=device)
        self._draft_status = torch.zeros(limits.max_num_seqs, dtype=torch.int32, device=device)
        self._masks = StaticMasks(most_tokens, model.config.vocab_size, device)
        self._results = StaticResults(max(_num_words(bucket) for bucket in self._buckets), device)
        self._steps: dict[Bucket, _Step] = {}
        self._uploaded = torch.cuda.Event() if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        """After the last upload: before it, the arrays on the host must stay as they are."""

    @property
    def num_buckets(self) -> int:
        return len(self._buckets)

    @torch.inference_mode()
    def warm_up(self, advance: Callable[[int], None]) -> None:
        """Record every bucket, the largest first. advance: called with 1 after each."""
        steps = {bucket: self._step(bucket) for bucket in self._buckets}
        self._recorder.prepare(partial(self._run_padding, bucket, step) for bucket, step in steps.items())
        for bucket, step in steps.items():
            self._pad(bucket, step.arrays)
            forward, sample = (self._recorder.record(run) for run in (step.forward, step.sample))
            self._steps[bucket] = _Step(step.arrays, forward, sample)
            advance(1)

    def _run_padding(self, bucket: Bucket, step: _Step) -> None:
        self._pad(bucket, step.arrays)
        step.forward()
        step.sample()

    def _pad(self, bucket: Bucket, arrays: StaticArrays) -> None:
        arrays.clear()
        arrays.host["aux_rows"][:] = np.arange(bucket.num_rows)
        pad_target(arrays.host, 0, 0, self._tokens.padding_row)
        arrays.upload()

    def bucket_of(self, plan: TargetPlan) -> Bucket | None:
        """The bucket of a checked plan; None where it must run eagerly: a long chunk, or one that draws nothing or
        scores its tokens."""
        if not plan.num_sampled_rows.all() or plan.scoring is not None:
            return None
        lengths = plan.rows.query_lens
        bucket = self._choice.smallest(len(lengths), int(lengths.max()), len(plan.rows.token_ids))
        return bucket if bucket in self._steps else None

    def forward(self, bucket: Bucket, plan: TargetPlan, region: int) -> None:
        """Queue the layers over a checked plan. region: of the aux buffer."""
        if self._uploaded is not None:
            self._uploaded.synchronize()
        arrays = self._steps[bucket].arrays
        first_aux_row = region * self._aux_buffer.rows if self._aux_buffer else 0
        rows = RowArrays.of(plan.rows, self._pool.block_size)
        fill_target(arrays.host, plan, rows, first_aux_row, self._tokens.padding_row)
        num_columns = -(-int(plan.rows.seq_lens.max()) // self._pool.block_size)
        self._table.upload(plan.rows.block_table, num_columns)
        arrays.upload()
        if self._uploaded is not None:
            self._uploaded.record()
        self._steps[bucket].forward()

    def read(self, bucket: Bucket) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the draft tokens that the last `forward` has read: window [B, W] and draft status [B], both int32."""
        num_seqs, width = bucket.num_seqs, bucket.query_len - 1
        return self._window[: num_seqs * width].view(num_seqs, width), self._draft_status[:num_seqs]

    def sample(self, bucket: Bucket, plan: TargetPlan) -> Callable[[], Arrays]:
        """Queue the draws and the verification after `forward`; what it returns waits for them."""
        if plan.logit_mask is not None or self._masks.num_masked:
            self._masks.upload(plan.logit_mask, _step_rows(plan))
        self._steps[bucket].sample()
        return partial(_results, bucket, plan, self._results.send(_num_words(bucket)))

    def _step(self, bucket: Bucket) -> _Step:
        """A bucket's functions, not recorded yet."""
        arrays = StaticArrays(self._layouts[bucket], self._arena)
        inputs = static_sampling_inputs(arrays.device, bucket.num_seqs, self._device)

        def sample() -> None:
            tensors = arrays.device
            window, draft_status = self.read(bucket)
            rows = SamplingRows(**{name: tensors[name] for name in _ROW_FIELDS}, window_token_ids=window)
            logits = self._model.compute_logits(self.hidden[: bucket.num_rows])
            self._kernels.mask_logits(logits, self._masks.tensor, self._masks.of_row[: bucket.num_rows])
            drawn = self._kernels.sample_tokens(logits, inputs, rows)
            verified = self._kernels.verify_draft_tokens(
                drawn.token_ids,
                drawn.status,
                tensors["first_row"],
                window,
                tensors["num_draft_tokens"],
            )
            token_ids, accepted = verified.output_token_ids, verified.num_accepted_tokens
            self._ops.store_drawn(token_ids, accepted, tensors["table_rows"], self._tokens.drawn)
            self._results.store([token_ids, accepted, verified.status, draft_status])

        return _Step(arrays, partial(self._run_forward, bucket, arrays.device), sample)

    def _run_forward(self, bucket: Bucket, tensors: dict[str, torch.Tensor]) -> None:
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
        token_ids = self._token_ids[: bucket.num_rows]
        table, vocab_size = self._tokens, self._model.config.vocab_size
        self._ops.read_tokens(
            tensors, table.drawn, table.proposed, token_ids, *self.read(bucket), vocab_size=vocab_size
        )
        hidden, aux = self._model.forward(token_ids, metadata, self._pool.tensor, self._pool.scale, self._aux_layer_ids)
        self.hidden[: bucket.num_rows].copy_(hidden)
        if self._aux_buffer is not None and aux is not None:
            self._aux_buffer.all_rows.index_copy_(0, tensors["aux_rows"], aux)


_ROW_FIELDS = ("sequence", "token_index", "window_len")


def _step_rows(plan: TargetPlan) -> Int32Array | None:
    """[M] the step's rows that have a mask. A plan counts sampled rows only; a captured step draws at every row."""
    if plan.masked_rows is None or plan.num_sampled_rows.sum() == len(plan.rows.token_ids):
        return plan.masked_rows
    return SampledRows.of(plan).sampled_rows[plan.masked_rows].astype(np.int32)


def _num_words(bucket: Bucket) -> int:
    """Results of a step: tokens of two words each, then accepted tokens and two kinds of status."""
    return bucket.num_seqs * (2 * bucket.query_len + 3)


def _results(bucket: Bucket, plan: TargetPlan, arriving: ArrivingWords) -> Arrays:
    """Return what a step drew for its B sequences, all of which sample."""
    words, num_seqs, width = arriving.wait(), bucket.num_seqs, bucket.query_len
    num_tokens, count = 2 * num_seqs * width, len(plan.num_sampled_rows)
    accepted, status, draft_status = words[num_tokens:].reshape(3, num_seqs)[:, :count]
    # A bucket may be wider than the plan's longest verify.
    longest = int(plan.num_sampled_rows.max())
    results = {
        "output_token_ids": words[:num_tokens].view(np.int64).reshape(num_seqs, width)[:count, :longest],
        "num_accepted_tokens": accepted,
        "sample_status": status,
    }
    return results | {"draft_status": draft_status} if plan.draft_step else results
