"""`TargetRunner`: the target behind the `Target` Protocol, in the process that calls it."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from typing_extensions import Unpack

from kimi_backend.models.kimi_k25 import KimiTarget
from kimi_backend.runners.aux_buffer import AuxBuffer
from kimi_backend.runners.graphs.target_graphs import CapturedStep, TargetGraphs
from kimi_backend.runners.hand_over.token_table import TokenTable, share
from kimi_backend.runners.host_transfer import Arrays, to_device, to_host
from kimi_backend.runners.kv_pool import KvPool
from kimi_backend.runners.plan_checks import RunnerLimits
from kimi_backend.runners.prompt_scoring import read_scores, score_tokens
from kimi_backend.runners.sampled_rows import SampledRows, mask_of_row
from kimi_backend.runners.sampling_tensors import has_processors
from kimi_backend.runners.step_runner import Launched, Options, StepRunner, Tensors
from kimi_backend.runners.step_timing import target_plan
from kimi_backend.runners.warm_up import idle_chunk
from kimi_backend.types.plan import AuxHandle, RowPlan, TargetPlan, TargetReply
from kimi_kernels.kernel_set import KernelSet
from kimi_kernels.sampling_inputs import (
    PLACEHOLDER_TOKEN_ID,
    STATUS_NOT_FINITE,
    STATUS_OK,
    SampleOutput,
    SamplingRows,
    VerifyOutput,
)
from kimi_kernels.token_table import stamp_of


class TargetRunner(StepRunner):
    """Runs step plans of the target."""

    def __init__(
        self,
        model: KimiTarget,
        kernels: KernelSet,
        pool: KvPool,
        limits: RunnerLimits,
        aux_layer_ids: tuple[int, ...] = (),
        **options: Unpack[Options],
    ) -> None:
        """aux_layer_ids: R(j) that the draft reads; empty without a draft."""
        super().__init__(model.config, kernels, pool, limits, model.num_heads, options)
        self._model = model
        self._aux_layer_ids = aux_layer_ids
        hidden_size = model.config.hidden_size
        self._description = replace(
            self._description, role="target", aux_layer_ids=aux_layer_ids, hidden_size=hidden_size
        )
        self._graphs: TargetGraphs | None = None
        if self._recorder is None or self.table is None:
            return
        if aux_layer_ids and self.aux_buffer is None:
            width, rows = len(aux_layer_ids) * hidden_size, limits.max_num_batched_tokens
            self.aux_buffer = AuxBuffer.allocate(1, rows, width, model.dtype, self.device)
        self._graphs = TargetGraphs(
            model, kernels, pool, limits, self._builder, self._recorder, aux_layer_ids, self.aux_buffer, self.table
        )

    @property
    def depth(self) -> int:
        """See `Target.depth`."""
        return 0 if self._graphs is None else 2

    @torch.inference_mode()
    def launch(self, plan: TargetPlan) -> Launched[TargetReply]:
        """See `Target.launch`. Aux hidden states are laid out by row; rows of sequences that do not want them hold them
        too, and there are none when no sequence does. In a buffer they stay until as many further steps as it has
        regions. Log-probabilities beside placeholders are NaN.

        Raises:
            InvalidRequestError: a field of the plan is wrong; nothing was run.
        """
        self._checker.check_target(plan)
        with self.workers.run(plan):
            if self.table is not None and self.table.is_split and plan.draft_step:
                share(self.table.proposed, self._group)
            step = None if self._graphs is None else self._graphs.find(plan)
            if self._graphs is None or step is None or (_wants_more(plan) and step.draws.are_wanted is not None):
                return self._launch_eagerly(plan)
            return self._launch_captured(self._graphs, step)

    def drop_captures(self) -> None:
        """See `StepRunner.drop_captures`."""
        self._graphs = self._recorder = None

    def _captured(self) -> TargetGraphs | None:
        return self._graphs

    def _run_idle_chunk(self, num_rows: int) -> None:
        token_ids, metadata = idle_chunk(self._builder, self._pool, num_rows, self._limits.max_model_len)
        self._model.forward(token_ids, metadata, self._pool.tensor, self._pool.scale, self._aux_layer_ids)

    def _launch_timed(self, rows: RowPlan, num_proposals: int) -> Launched[TargetReply]:
        return self.launch(target_plan(rows, wants_aux=bool(self._aux_layer_ids)))

    def _launch_captured(self, graphs: TargetGraphs, step: CapturedStep) -> Launched[TargetReply]:
        plan = step.plan
        region = self.aux_buffer.take_region() if self.aux_buffer is not None else 0
        graphs.forward(step, region)
        aux = self._aux_handle(region, len(plan.rows.token_ids)) if plan.wants_aux.any() else AuxHandle()
        if not _wants_more(plan):
            return Launched(partial(self._reply, plan, aux, graphs.sample(step)))
        window, draft_status = graphs.read(step)
        tensors = to_device(_sampling_arrays(plan, SampledRows.of(plan)), self.device)
        tensors["window_token_ids"] = window.contiguous()
        results = self._sample(plan, graphs.hidden[: len(step.draws.rows)], tensors)
        if plan.draft_step:
            results["draft_status"] = draft_status.clone()
        return Launched(partial(self._reply, plan, aux, partial(to_host, results)))

    def _launch_eagerly(self, plan: TargetPlan) -> Launched[TargetReply]:
        rows, sampled = plan.rows, SampledRows.of(plan)
        tensors = to_device(
            {
                "token_ids": rows.token_ids,
                "query_lens": rows.query_lens,
                "seq_lens": rows.seq_lens,
                "block_table": rows.block_table,
                "last_rows": np.cumsum(rows.query_lens, dtype=np.int64) - 1,
                **_sampling_arrays(plan, sampled),
            },
            self.device,
        )
        results: Tensors = {}
        if self.table is not None and (plan.draft_step or plan.reads_table):
            window, draft_status = self._read_table(self.table, plan, tensors)
            tensors["window_token_ids"] = window[:, : sampled.window_token_ids.shape[1]].contiguous()
            if plan.draft_step:
                results["draft_status"] = draft_status
        metadata = self._builder.build(
            tensors["query_lens"], tensors["seq_lens"], tensors["block_table"], rows.query_lens, rows.seq_lens
        )
        hidden, aux = self._model.forward(
            tensors["token_ids"],
            metadata,
            self._pool.tensor,
            self._pool.scale,
            self._aux_layer_ids if plan.wants_aux.any() else (),
        )
        handle = self._hand_over(aux)
        is_finite = hidden[tensors["last_rows"]].isfinite().all(dim=1)
        # The draft's ranks may read the buffer once rank 0 has replied, so its reply waits for every rank: here, or in
        # what gathers the logits.
        is_lost = self._group.all_reduce((~is_finite).to(torch.int32))
        results["seq_status"] = torch.where(is_lost == 0, STATUS_OK, STATUS_NOT_FINITE).to(torch.int32)
        if sampled.num_rows:
            results |= self._sample(plan, hidden[tensors["sampled_rows"]], tensors)
        if plan.scoring is not None:
            results |= score_tokens(self._model.compute_logits, hidden, plan.scoring)
        return Launched(partial(self._reply, plan, handle, partial(to_host, results)))

    def _read_table(self, table: TokenTable, plan: TargetPlan, tensors: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
        """Put the plan's tokens and the table's together, in `token_ids`; window [B, k] and draft status [S]."""
        rows, num_seqs = plan.rows, len(plan.table_rows)
        step = to_device(
            {
                "sequence": np.repeat(np.arange(num_seqs), rows.query_lens),
                "cu_seqlens": np.concatenate([[0], np.cumsum(rows.query_lens)]).astype(np.int32),
                "num_given": plan.num_given,
                "table_rows": plan.table_rows.astype(np.int64),
                "num_draft_tokens": np.maximum(plan.num_sampled_rows - 1, 0),
                "stamp": np.array([stamp_of(plan.draft_step)], np.int32),
                "sampling": np.flatnonzero(plan.num_sampled_rows),
            },
            self.device,
        )
        step["token_ids"], tensors["token_ids"] = tensors["token_ids"], torch.empty_like(tensors["token_ids"])
        shapes = (num_seqs, table.proposed.shape[1] - 2), (num_seqs,)
        window, draft_status = (torch.empty(shape, dtype=torch.int32, device=self.device) for shape in shapes)
        self._ops.read_tokens(
            step,
            table.drawn,
            table.proposed,
            tensors["token_ids"],
            window,
            draft_status,
            vocab_size=self._model.config.vocab_size,
        )
        return window[step["sampling"]], draft_status

    def _hand_over(self, aux: torch.Tensor | None) -> AuxHandle:
        """Into the buffer, where there is one."""
        if aux is None or self.aux_buffer is None:
            return AuxHandle(tensor=aux)
        region = self.aux_buffer.take_region()
        self.aux_buffer.region(region)[: aux.shape[0]].copy_(aux)
        return self._aux_handle(region, aux.shape[0])

    def _aux_handle(self, region: int, num_rows: int) -> AuxHandle:
        if self.aux_buffer is None:
            return AuxHandle()
        return AuxHandle(tensor=self.aux_buffer.region(region)[:num_rows], region=region)

    def _sample(self, plan: TargetPlan, hidden: torch.Tensor, tensors: Tensors) -> Tensors:
        """Draw from hidden states of every sampled row, compare with the draft tokens; entries of `TargetReply`."""
        window = tensors["window_token_ids"]
        logits = self._model.compute_logits(hidden)
        sampling_rows = SamplingRows(
            sequence=tensors["sequence"],
            token_index=tensors["token_index"],
            window_token_ids=window,
            window_len=tensors["window_len"],
            logit_mask=tensors.get("logit_mask"),
            mask_of_row=tensors.get("mask_of_row"),
        )
        drawn = self._kernels.sample_tokens(
            logits, self._sampling.inputs(plan.sampling), sampling_rows, num_logprobs=plan.num_logprobs
        )
        verified = self._kernels.verify_draft_tokens(
            drawn.token_ids,
            drawn.status,
            tensors["first_row"],
            window,
            tensors["num_draft_tokens"],
        )
        if self.table is not None:
            token_ids, accepted = verified.output_token_ids, verified.num_accepted_tokens
            self._ops.store_drawn(token_ids, accepted, tensors["sampling_table_rows"], self.table.drawn)
        results = {
            "sample_status": verified.status,
            "output_token_ids": verified.output_token_ids,
            "num_accepted_tokens": verified.num_accepted_tokens,
        }
        if plan.num_logprobs is not None:
            results |= _logprobs_by_output(drawn, verified, tensors["first_row"])
        return results

    def _reply(self, plan: TargetPlan, aux: AuxHandle, fetch: Callable[[], Arrays]) -> TargetReply:
        """fetch: waits for the step's results."""
        arrays = fetch()
        seq_status = np.zeros(len(plan.num_sampled_rows), np.int32)
        if "seq_status" in arrays:
            seq_status[:] = arrays["seq_status"]
        if "sample_status" in arrays:
            seq_status[plan.num_sampled_rows > 0] = arrays["sample_status"]
        return TargetReply(
            step_id=plan.step_id,
            runner_epoch=self._description.runner_epoch,
            seq_status=seq_status,
            output_token_ids=arrays.get("output_token_ids", np.empty((0, 1), np.int64)),
            num_accepted_tokens=arrays.get("num_accepted_tokens", np.empty(0, np.int32)),
            aux=aux,
            logprobs=arrays.get("logprobs"),
            top_logprob_ids=arrays.get("top_logprob_ids"),
            top_logprobs=arrays.get("top_logprobs"),
            draft_status=arrays.get("draft_status"),
            scores=read_scores(arrays),
        )


def _sampling_arrays(plan: TargetPlan, sampled: SampledRows) -> Arrays:
    """Name the arrays that `_sample` reads."""
    arrays = dict(sampled.arrays())
    arrays["sampling_table_rows"] = plan.table_rows[plan.num_sampled_rows > 0].astype(np.int64)
    if plan.logit_mask is not None and plan.masked_rows is not None:
        arrays["logit_mask"] = plan.logit_mask
        arrays["mask_of_row"] = mask_of_row(plan.masked_rows, sampled.num_rows)
    return arrays


def _wants_more(plan: TargetPlan) -> bool:
    """Tell whether more is wanted than a captured step's draws have."""
    return plan.num_logprobs is not None or has_processors(plan.sampling)


def _logprobs_by_output(drawn: SampleOutput, verified: VerifyOutput, first_row: torch.Tensor) -> Tensors:
    """Rows of log-probabilities -> [B, W + 1, ...] beside `output_token_ids`."""
    assert drawn.logprobs is not None
    assert drawn.top_logprob_ids is not None
    assert drawn.top_logprobs is not None
    place = torch.arange(verified.output_token_ids.shape[1], device=first_row.device)
    is_used = place <= verified.num_accepted_tokens[:, None]
    row = first_row[:, None] + place * is_used
    return {
        "logprobs": drawn.logprobs[row].masked_fill(~is_used, float("nan")),
        "top_logprob_ids": drawn.top_logprob_ids[row].masked_fill(~is_used[..., None], PLACEHOLDER_TOKEN_ID),
        "top_logprobs": drawn.top_logprobs[row].masked_fill(~is_used[..., None], float("nan")),
    }
