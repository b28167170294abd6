"""`TargetGraphs`: the target's steps, captured.

A step is two graphs, each with buckets of its own. The first runs the layers over all rows, leaves aux hidden states in
the buffer and the normed hidden states of the rows that draw in a tensor of their own; the second makes logits of
those, rules out what masks do, draws and verifies. Between them the masks of the rows that have one are uploaded, if
any row has. A step whose draws want what no graph holds (penalties, bans, log-probabilities) takes the first graph
only.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch

from kimi_backend.models.kimi_k25 import KimiTarget
from kimi_backend.runners.aux_buffer import AuxBuffer
from kimi_backend.runners.graphs.buckets import Bucket, BucketChoice, chosen_batch_sizes, prompt_buckets, row_buckets
from kimi_backend.runners.graphs.chunk_parts import ChunkParts, is_worth_cutting
from kimi_backend.runners.graphs.draws import Draws
from kimi_backend.runners.graphs.recorder import Recorder, Run
from kimi_backend.runners.graphs.static_arrays import Arena, ArrivingWords, StaticArrays, StaticMasks, StaticResults
from kimi_backend.runners.graphs.static_tables import StaticTables
from kimi_backend.runners.graphs.target_inputs import (
    draw_layout,
    fill_draws,
    fill_forward,
    forward_layout,
    pad_draws,
    pad_forward,
    static_sampling_inputs,
)
from kimi_backend.runners.hand_over.token_table import TokenTable
from kimi_backend.runners.host_transfer import Arrays
from kimi_backend.runners.kv_pool import KvPool
from kimi_backend.runners.metadata_builder import MetadataBuilder
from kimi_backend.runners.plan_checks import RunnerLimits
from kimi_backend.runners.row_arrays import RowArrays
from kimi_backend.types.plan import TargetPlan
from kimi_kernels.attention_batch import AttentionBatch, AttentionMetadata
from kimi_kernels.kernel_set import KernelSet
from kimi_kernels.sampling_inputs import SamplingRows
from kimi_kernels.token_table import token_table_ops


@dataclass(frozen=True, slots=True)
class _Step:
    """A bucket's arrays and what runs on them."""

    arrays: StaticArrays
    run: Run


@dataclass(frozen=True, slots=True)
class CapturedStep:
    """A plan and the buckets that hold it."""

    plan: TargetPlan
    rows: RowArrays
    draws: Draws
    forward: Bucket
    draw: Bucket


class TargetGraphs:
    """Captured steps of one target."""

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
        self._max_seq_len, self._most_drafts = limits.max_model_len, limits.max_speculative_tokens
        device = pool.tensor.device
        self._device = device
        sizes = chosen_batch_sizes(limits.max_num_seqs, limits.capture_batch_sizes)
        draws = row_buckets(sizes, limits.max_speculative_tokens + 1, limits.max_num_batched_tokens)
        prompts = prompt_buckets(limits.max_num_seqs, limits.max_num_batched_tokens, builder.num_mla_heads)
        self._forward_layouts = {bucket: forward_layout(bucket) for bucket in (*prompts, *draws)}
        self._draw_layouts = {bucket: draw_layout(bucket) for bucket in draws}
        self._forward_choice, self._draw_choice = BucketChoice(self._forward_layouts), BucketChoice(draws)
        self._arena = Arena(self._forward_layouts.values(), device, before=self._draw_layouts.values())
        self._tables = StaticTables(self._forward_layouts, limits, pool)
        most_draws = max(bucket.num_rows for bucket in draws)
        self.hidden = torch.zeros((most_draws, model.config.hidden_size), dtype=model.dtype, device=device)
        """[most rows that draw, hidden_size] normed hidden states of those of the last step, in its order."""
        most_rows = max(bucket.num_rows for bucket in self._forward_layouts)
        self._token_ids = torch.zeros(most_rows, dtype=torch.int32, device=device)
        self._window = torch.zeros((limits.max_num_seqs, self._most_drafts), dtype=torch.int32, device=device)
        self._draft_status = torch.zeros(limits.max_num_seqs, dtype=torch.int32, device=device)
        self._masks = StaticMasks(most_draws, model.config.vocab_size, device)
        self._results = StaticResults(max(_num_words(bucket) for bucket in draws), device)
        self._forwards: dict[Bucket, _Step] = {}
        self._draws: dict[Bucket, _Step] = {}
        self._uploaded = torch.cuda.Event() if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        """The end of the last upload: before it, the arrays on the host must stay as they are."""

    @property
    def num_buckets(self) -> int:
        return len(self._forward_layouts) + len(self._draw_layouts)

    @torch.inference_mode()
    def warm_up(self, advance: Callable[[int], None]) -> None:
        """Record every bucket, the largest first. advance: called with 1 after each."""
        forwards = {bucket: self._forward_step(bucket) for bucket in self._forward_layouts}
        draws = {bucket: self._draw_step(bucket) for bucket in self._draw_layouts}
        steps = [*forwards.items(), *draws.items()]
        self._recorder.prepare(partial(self._run_padding, step) for _, step in steps)
        for recorded, unrecorded in ((self._forwards, forwards), (self._draws, draws)):
            for bucket, step in unrecorded.items():
                self._pad(step.arrays)
                recorded[bucket] = replace(step, run=self._recorder.record(step.run))
                advance(1)

    def _run_padding(self, step: _Step) -> None:
        self._pad(step.arrays)
        step.run()

    def _pad(self, arrays: StaticArrays) -> None:
        arrays.clear()
        if "aux_rows" in arrays.host:
            arrays.host["aux_rows"][:] = np.arange(len(arrays.host["aux_rows"]))
            pad_forward(arrays.host, 0, 0, 0, self._tokens.padding_row)
        else:
            pad_draws(arrays.host, 0, 0, self._tokens.padding_row)
        arrays.upload()

    def find(self, plan: TargetPlan) -> CapturedStep | None:
        """The buckets of a checked plan; None where it must run eagerly: too many rows, or one that scores its
        tokens."""
        if plan.scoring is not None:
            return None
        lengths = plan.rows.query_lens
        forward = self._forward_choice.smallest(len(lengths), int(lengths.max()), len(plan.rows.token_ids))
        if forward not in self._forwards or not is_worth_cutting(plan.rows, forward, self._builder.num_mla_heads):
            return None
        rows = RowArrays.of(plan.rows, self._pool.block_size)
        draws = Draws.of(plan, rows)
        draw = self._draw_choice.smallest(len(lengths), draws.most, len(draws.rows))
        return CapturedStep(plan, rows, draws, forward, draw) if draw in self._draws else None

    def forward(self, step: CapturedStep, region: int) -> None:
        """Queue the layers over a step's rows. region: of the aux buffer."""
        if self._uploaded is not None:
            self._uploaded.synchronize()
        plan, forward, draw = step.plan, self._forwards[step.forward], self._draws[step.draw]
        first_aux_row = region * self._aux_buffer.rows if self._aux_buffer else 0
        parts = ChunkParts.of(plan.rows, step.rows, step.forward)
        padding_row = self._tokens.padding_row
        fill_forward(forward.arrays.host, plan, step.rows, parts, step.draws, first_aux_row, padding_row)
        fill_draws(draw.arrays.host, plan, step.draws, padding_row)
        if step.forward.cuts_chunks:
            self._tables.upload_parts(plan.rows, parts)
        else:
            self._tables.upload(plan.rows.block_table, int(plan.rows.seq_lens.max()))
        forward.arrays.upload(before=draw.arrays)
        if self._uploaded is not None:
            self._uploaded.record()
        forward.run()

    def read(self, step: CapturedStep) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the draft tokens that the last `forward` has read: window [S, W] and draft status [S], both int32."""
        num_seqs = len(step.draws.counts)
        return self._window[:num_seqs, : step.draws.most - 1], self._draft_status[:num_seqs]

    def sample(self, step: CapturedStep) -> Callable[[], Arrays]:
        """Queue the draws and the verification after `forward`; what it returns waits for them."""
        plan = step.plan
        if plan.logit_mask is not None or self._masks.num_masked:
            rows = None if plan.masked_rows is None else step.draws.indices(plan.masked_rows)
            self._masks.upload(plan.logit_mask, rows)
        self._draws[step.draw].run()
        return partial(_results, step, self._results.send(_num_words(step.draw)))

    def _draw_step(self, bucket: Bucket) -> _Step:
        """A bucket's draws, not recorded yet."""
        arrays = StaticArrays(self._draw_layouts[bucket], self._arena, is_before=True)
        tensors = arrays.device
        inputs = static_sampling_inputs(tensors, bucket.num_seqs, self._device)

        def sample() -> None:
            window = self._window[: bucket.num_seqs, : bucket.query_len - 1]
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
            self._results.store([token_ids, accepted, verified.status, self._draft_status[: bucket.num_seqs]])

        return _Step(arrays, sample)

    def _forward_step(self, bucket: Bucket) -> _Step:
        """A bucket's layers, not recorded yet."""
        arrays = StaticArrays(self._forward_layouts[bucket], self._arena)
        return _Step(arrays, partial(self._run_forward, bucket, arrays.device))

    def _run_forward(self, bucket: Bucket, tensors: dict[str, torch.Tensor]) -> None:
        batch = AttentionBatch(
            cu_seqlens_q=tensors["part_cu_seqlens"],
            seq_lens=tensors["seq_lens"],
            block_table=self._tables.of(bucket),
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
        window = self._window[: bucket.num_seqs, : self._most_drafts if bucket.cuts_chunks else bucket.query_len - 1]
        table, status = self._tokens, self._draft_status[: bucket.num_seqs]
        vocab_size = self._model.config.vocab_size
        self._ops.read_tokens(tensors, table.drawn, table.proposed, token_ids, window, status, vocab_size=vocab_size)
        hidden, aux = self._model.forward(token_ids, metadata, self._pool.tensor, self._pool.scale, self._aux_layer_ids)
        kept_rows = tensors["kept_rows"][: len(self.hidden)]
        torch.index_select(hidden, 0, kept_rows, out=self.hidden[: len(kept_rows)])
        if self._aux_buffer is not None and aux is not None:
            self._aux_buffer.all_rows.index_copy_(0, tensors["aux_rows"], aux)


_ROW_FIELDS = ("sequence", "token_index", "window_len")


def _num_words(bucket: Bucket) -> int:
    """Results of a step: tokens of two words each, then accepted tokens and two kinds of status."""
    return bucket.num_seqs * (2 * bucket.query_len + 3)


def _results(step: CapturedStep, arriving: ArrivingWords) -> Arrays:
    """Return what a step drew for the sequences that sample, and what became of all."""
    words, num_seqs, width = arriving.wait(), step.draw.num_seqs, step.draw.query_len
    num_tokens, count, are_wanted = 2 * num_seqs * width, len(step.draws.counts), step.draws.are_wanted
    accepted, status, draft_status = words[num_tokens:].reshape(3, num_seqs)[:, :count]
    # A bucket may be wider than the plan's longest verify.
    tokens = words[:num_tokens].view(np.int64).reshape(num_seqs, width)[:count, : step.draws.most]
    if are_wanted is not None:
        tokens, accepted = tokens[are_wanted], accepted[are_wanted]
    results = {"output_token_ids": tokens, "num_accepted_tokens": accepted, "seq_status": status}
    return results | {"draft_status": draft_status} if step.plan.draft_step else results
