"""`TargetRunner`: the target behind the `TargetModel` Protocol, in the process that calls it."""

import secrets
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from kimi_backend.checkpoint.progress import no_progress
from kimi_backend.errors import InvalidRequestError
from kimi_backend.models.kimi_k25 import KimiTarget
from kimi_backend.parallel import SingleRank, TensorParallelGroup
from kimi_backend.runners.aux_buffer import AuxBuffer
from kimi_backend.runners.device_name import device_name
from kimi_backend.runners.graphs.buckets import Bucket
from kimi_backend.runners.graphs.recorder import Recorder
from kimi_backend.runners.graphs.target_graphs import DrawnStep, TargetGraphs
from kimi_backend.runners.host_transfer import Arrays, to_device, to_host
from kimi_backend.runners.kv_pool import KvPool
from kimi_backend.runners.left_tokens import as_input, left_places, resolve_left, take_left, window_rows
from kimi_backend.runners.metadata_builder import MetadataBuilder
from kimi_backend.runners.plan_checks import PlanChecker, RunnerLimits
from kimi_backend.runners.ranks.peers import NO_PEERS, Peers, share
from kimi_backend.runners.sampled_rows import SampledRows
from kimi_backend.runners.sampling_tensors import SamplingUpload, has_processors
from kimi_backend.runners.warm_up import idle_chunk, prefill_lengths
from kimi_backend.spec_decode.protocols import OnQueued, PendingVerify
from kimi_backend.types.plan import AuxHandle, DrawnHandle, RunnerDescription, TargetPlan, TargetReply
from kimi_kernels.kernel_set import KernelSet
from kimi_kernels.sampling_inputs import (
    PLACEHOLDER_TOKEN_ID,
    STATUS_NOT_FINITE,
    STATUS_OK,
    SampleOutput,
    SamplingRows,
    VerifyOutput,
)

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchedVerify:
    """A captured step that is queued to its end."""

    plan: TargetPlan
    runner_epoch: int
    aux: AuxHandle
    drawn: DrawnStep

    def wait(self) -> TargetReply:
        """See `PendingVerify.wait`."""
        drawn = self.drawn.wait()
        return TargetReply(
            step_id=self.plan.step_id,
            runner_epoch=self.runner_epoch,
            seq_status=drawn.status,
            output_token_ids=drawn.output_token_ids,
            num_accepted_tokens=drawn.num_accepted_tokens,
            aux=self.aux,
            draft_status=drawn.draft_status,
        )


class TargetRunner:
    """Runs step plans. Keeps weights and KV, and nothing about sequences.

    With tensor parallelism every rank runs the same plan: rank 0's runner checks it and tells its peers.
    """

    def __init__(
        self,
        model: KimiTarget,
        kernels: KernelSet,
        pool: KvPool,
        limits: RunnerLimits,
        aux_layer_ids: tuple[int, ...] = (),
        split_tokens: int = 0,
        pretences: tuple[str, ...] = (),
        aux_buffer: AuxBuffer | None = None,
        recorder: Recorder | None = None,
        group: TensorParallelGroup | None = None,
        peers: Peers = NO_PEERS,
    ) -> None:
        """
        Args:
            pool: of `model.kv_pool_shape`, on the model's device.
            aux_layer_ids: R(j) that the draft reads; empty without a draft.
            split_tokens: see `kimi_kernels.signatures.PlanMlaDecode`.
            pretences: what the description says is not real.
            aux_buffer: where aux hidden states are left for the draft; without one, each step makes a tensor.
            recorder: makes verify steps repeatable, once `warm_up` has run; None runs every step as it comes.
            group: the model's.
            peers: of rank 0, the others.
        """
        limits.check_positions(model.config.max_position_embeddings)
        self.peers = peers
        self._group = group or SingleRank()
        self._model = model
        self._kernels = kernels
        self._pool = pool
        self._limits = limits
        self._aux_layer_ids = aux_layer_ids
        self._device = pool.tensor.device
        self._epoch = secrets.randbits(62)
        self._pretences = pretences
        self._builder = MetadataBuilder(
            kernels=kernels, block_size=pool.block_size, num_mla_heads=model.num_heads, split_tokens=split_tokens
        )
        self._checker = PlanChecker(
            limits=limits,
            vocab_size=model.config.vocab_size,
            num_blocks=pool.num_blocks,
            block_size=pool.block_size,
        )
        self._sampling = SamplingUpload(self._device)
        self._recorder = recorder
        self._launched: LaunchedVerify | None = None
        """The last step, if it was launched: the next one may read what it drew."""
        self._graphs: TargetGraphs | None = None
        if recorder is not None and aux_layer_ids and aux_buffer is None:
            width, rows = len(aux_layer_ids) * model.config.hidden_size, limits.max_num_batched_tokens
            aux_buffer = AuxBuffer.allocate(1, rows, width, model.dtype, self._device)
        self._aux_buffer = aux_buffer
        if recorder is not None:
            self._graphs = TargetGraphs(
                model, kernels, pool, limits, self._builder, recorder, aux_layer_ids, aux_buffer
            )

    def describe(self) -> RunnerDescription:
        """See `TargetModel.describe`."""
        return RunnerDescription(
            role="target",
            runner_epoch=self._epoch,
            block_size=self._pool.block_size,
            num_blocks=self._pool.num_blocks,
            max_num_batched_tokens=self._limits.max_num_batched_tokens,
            max_num_seqs=self._limits.max_num_seqs,
            max_model_len=self._limits.max_model_len,
            vocab_size=self._model.config.vocab_size,
            draft_vocab_size=None,
            aux_layer_ids=self._aux_layer_ids,
            hidden_size=self._model.config.hidden_size,
            kv_cache_dtype=self._pool.dtype_name,
            device=device_name(self._device),
            queues_steps=self._graphs is not None,
            pretences=self._pretences,
        )

    @property
    def device(self) -> torch.device:
        """That this runner computes on."""
        return self._device

    @property
    def aux_buffer(self) -> AuxBuffer | None:
        """Where steps leave their aux hidden states; None where each makes a tensor."""
        return self._aux_buffer

    @torch.inference_mode()
    def warm_up(self, advance: Callable[[int], None] = no_progress) -> None:
        """Of a runner that captures: run chunks of all lengths, so that every kernel is compiled and all memory that a
        step takes is taken, and record its steps. advance: called with the number of steps just done."""
        if self._graphs is None or self._recorder is None:
            return
        chunks = [partial(self._run_idle_chunk, length) for length in prefill_lengths(self._limits)]
        self._recorder.prepare(chunks)
        for chunk in chunks:
            chunk()
            advance(1)
        self._graphs.warm_up(advance)

    def _run_idle_chunk(self, num_rows: int) -> None:
        token_ids, metadata = idle_chunk(self._builder, self._pool, num_rows, self._limits.max_model_len)
        self._model.forward(token_ids, metadata, self._pool.tensor, self._pool.scale, self._aux_layer_ids)

    @property
    def num_warm_up_steps(self) -> int:
        """How often `warm_up` advances."""
        return self._graphs.num_buckets + len(prefill_lengths(self._limits)) if self._graphs is not None else 0

    @torch.inference_mode()
    def verify(self, plan: TargetPlan) -> TargetReply:
        """See `TargetModel.verify`. Aux hidden states are laid out by row; rows of sequences that do not want them
        hold them too, and there are none when no sequence does. In a buffer they stay until as many further steps as it
        has regions.

        Log-probabilities beside placeholders are NaN.

        Raises:
            InvalidRequestError: a field of the plan is wrong; nothing was run.
        """
        return self._verify(plan, None)

    @property
    def can_launch(self) -> bool:
        """See `LaunchingTarget.can_launch`."""
        return self._graphs is not None

    @torch.inference_mode()
    def verify_ahead(self, plan: TargetPlan, on_queued: OnQueued) -> TargetReply:
        """See `LaunchingTarget.verify_ahead`. Only a step that is captured to its end calls on_queued."""
        return self._verify(plan, on_queued)

    @torch.inference_mode()
    def launch(self, plan: TargetPlan) -> PendingVerify | None:
        """See `QueueingTarget.launch`. Takes steps that are captured to their end.

        Raises:
            InvalidRequestError: as `verify`.
        """
        if self._graphs is None:
            return None
        self._checker.check_target(plan)
        bucket = self._graphs.bucket_of(plan)
        if bucket is None or len(plan.rows.token_ids) > len(plan.rows.query_lens) or _wants_more(plan):
            return None
        if plan.drawn_rows is not None and not self._is_behind(plan):
            return None
        with self.peers.run("launch", plan):
            pending = self._launch_captured(self._graphs, bucket, plan, None)
        self._launched = pending
        return pending

    def _is_behind(self, plan: TargetPlan) -> bool:
        """Whether the last step is the one whose tokens the plan's rows embed."""
        last = self._launched
        if last is None or plan.drawn_rows is None or last.plan.step_id != plan.step_id - 1:
            return False
        return int(plan.drawn_rows.max()) < len(last.plan.num_sampled_rows)

    @torch.inference_mode()
    def verify_unheard(self, plan: TargetPlan) -> DrawnHandle | None:
        """`verify` on a rank whose reply nobody reads: does not wait for a step that is captured to its end.

        Returns:
            Where such a step leaves what it draws.
        """
        begun = self._begin(plan, None)
        if isinstance(begun, TargetReply) or self._graphs is None:
            return None
        return self._graphs.drawn(begun.drawn.bucket)

    def close(self) -> None:
        """End the other ranks and drop what is captured."""
        self.peers.close()
        self.drop_captures()

    def drop_captures(self) -> None:
        """Captured steps hold the collectives that they call. Only eager steps run afterwards."""
        self._graphs = self._recorder = self._launched = None

    def _verify(self, plan: TargetPlan, on_queued: OnQueued | None) -> TargetReply:
        begun = self._begin(plan, on_queued)
        return begun if isinstance(begun, TargetReply) else begun.wait()

    def _begin(self, plan: TargetPlan, on_queued: OnQueued | None) -> "TargetReply | LaunchedVerify":
        self._launched = None
        self._checker.check_target(plan)
        if plan.drawn_rows is not None:
            raise InvalidRequestError("plan drawn_rows: some given, a step that is waited for takes none")
        left = resolve_left(plan, self._device)
        bucket = self._graphs.bucket_of(plan) if self._graphs is not None else None
        shared = [] if left is None or self.peers.have_both else [left]
        with self.peers.run("verify", plan, shared=shared):
            if shared:
                (left,) = share(self._group, shared)
            if self._graphs is None or bucket is None:
                return self._verify_eagerly(plan, None if left is None else left.clone())
            if _wants_more(plan):
                return self._verify_captured(self._graphs, bucket, plan, left)
            step = self._launch_captured(self._graphs, bucket, plan, left)
            if on_queued is not None:
                on_queued(step.aux, self._graphs.drawn(bucket))
            return step

    def _verify_captured(
        self, graphs: TargetGraphs, bucket: Bucket, plan: TargetPlan, left: torch.Tensor | None
    ) -> TargetReply:
        """A step whose draws want more than those captured have."""
        aux = self._forward_captured(graphs, bucket, plan, left)
        copied = None if left is None else graphs.left(bucket)
        tensors = to_device(_sampling_arrays(plan, SampledRows.of(plan), copied), self._device)
        results = self._sample(plan, graphs.hidden, tensors, copied)
        return self._reply(plan, aux, results | _draft_status(plan, copied))

    def _launch_captured(
        self, graphs: TargetGraphs, bucket: Bucket, plan: TargetPlan, left: torch.Tensor | None
    ) -> "LaunchedVerify":
        aux = self._forward_captured(graphs, bucket, plan, left)
        return LaunchedVerify(plan=plan, runner_epoch=self._epoch, aux=aux, drawn=graphs.sample(bucket, plan))

    def _forward_captured(
        self, graphs: TargetGraphs, bucket: Bucket, plan: TargetPlan, left: torch.Tensor | None
    ) -> AuxHandle:
        region = self._aux_buffer.take_region() if self._aux_buffer is not None else 0
        graphs.forward(bucket, plan, region, left)
        return self._aux_handle(region, len(plan.rows.token_ids)) if plan.wants_aux.any() else AuxHandle()

    def _verify_eagerly(self, plan: TargetPlan, left: torch.Tensor | None) -> TargetReply:
        """left: a copy of the plan's `draft_tokens`."""
        rows, sampled = plan.rows, SampledRows.of(plan)
        tensors = to_device(
            {
                "token_ids": rows.token_ids,
                "query_lens": rows.query_lens,
                "seq_lens": rows.seq_lens,
                "block_table": rows.block_table,
                "last_rows": np.cumsum(rows.query_lens, dtype=np.int64) - 1,
                **({} if left is None else {"token_places": left_places(plan, left.shape[1])}),
                **_sampling_arrays(plan, sampled, left),
            },
            self._device,
        )
        metadata = self._builder.build(
            tensors["query_lens"], tensors["seq_lens"], tensors["block_table"], rows.query_lens, rows.seq_lens
        )
        token_ids = tensors["token_ids"]
        if left is not None:
            token_ids = as_input(take_left(token_ids, left, tensors["token_places"]), self._model.config.vocab_size)
        hidden, aux = self._model.forward(
            token_ids,
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
        results = {"seq_status": torch.where(is_lost == 0, STATUS_OK, STATUS_NOT_FINITE).to(torch.int32)}
        if sampled.num_rows:
            results |= self._sample(plan, hidden, tensors, left)
        return self._reply(plan, handle, results | _draft_status(plan, left))

    def _hand_over(self, aux: torch.Tensor | None) -> AuxHandle:
        """Into the buffer, where there is one."""
        if aux is None or self._aux_buffer is None:
            return AuxHandle(tensor=aux)
        region = self._aux_buffer.take_region()
        self._aux_buffer.region(region)[: aux.shape[0]].copy_(aux)
        return self._aux_handle(region, aux.shape[0])

    def _aux_handle(self, region: int, num_rows: int) -> AuxHandle:
        if self._aux_buffer is None:
            return AuxHandle()
        return AuxHandle(tensor=self._aux_buffer.region(region)[:num_rows], region=region)

    def _sample(self, plan: TargetPlan, hidden: torch.Tensor, tensors: Tensors, left: torch.Tensor | None) -> Tensors:
        """Draw every sampled row, compare with the draft tokens; entries of `TargetReply`."""
        window = tensors["window_token_ids"]
        if left is not None:
            window = take_left(window, left, tensors["window_places"])
        logits = self._model.compute_logits(hidden[tensors["sampled_rows"]])
        sampling_rows = SamplingRows(
            sequence=tensors["sequence"],
            token_index=tensors["token_index"],
            window_token_ids=window,
            window_len=tensors["window_len"],
            logit_mask=tensors.get("logit_mask"),
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
        results = {
            "sample_status": verified.status,
            "output_token_ids": verified.output_token_ids,
            "num_accepted_tokens": verified.num_accepted_tokens,
        }
        if plan.num_logprobs is not None:
            results |= _logprobs_by_output(drawn, verified, tensors["first_row"])
        return results

    def _reply(self, plan: TargetPlan, aux: AuxHandle, results: Tensors) -> TargetReply:
        arrays = to_host(results)
        seq_status = np.zeros(len(plan.num_sampled_rows), np.int32)
        if "seq_status" in arrays:
            seq_status[:] = arrays["seq_status"]
        if "sample_status" in arrays:
            seq_status[plan.num_sampled_rows > 0] = arrays["sample_status"]
        return TargetReply(
            step_id=plan.step_id,
            runner_epoch=self._epoch,
            seq_status=seq_status,
            output_token_ids=arrays.get("output_token_ids", np.empty((0, 1), np.int64)),
            num_accepted_tokens=arrays.get("num_accepted_tokens", np.empty(0, np.int32)),
            aux=aux,
            logprobs=arrays.get("logprobs"),
            top_logprob_ids=arrays.get("top_logprob_ids"),
            top_logprobs=arrays.get("top_logprobs"),
            draft_status=arrays.get("draft_status"),
        )


def _sampling_arrays(plan: TargetPlan, sampled: SampledRows, left: torch.Tensor | None) -> Arrays:
    """What `_sample` reads, by name."""
    arrays = dict(sampled.arrays())
    if plan.logit_mask is not None:
        arrays["logit_mask"] = plan.logit_mask
    if left is not None:
        rows = window_rows(plan, sampled.window_token_ids.shape[1])
        arrays["window_places"] = np.where(rows >= 0, left_places(plan, left.shape[1])[rows], -1)
    return arrays


def _wants_more(plan: TargetPlan) -> bool:
    """Than a captured step's draws have."""
    return plan.num_logprobs is not None or plan.logit_mask is not None or has_processors(plan.sampling)


def _draft_status(plan: TargetPlan, left: torch.Tensor | None) -> Tensors:
    return {} if left is None else {"draft_status": left[0, : plan.draft_tokens.num_seqs]}


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
