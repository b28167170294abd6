"""`DraftRunner`: an EAGLE3 draft behind the `DraftModel` Protocol, in the process that calls it."""

import secrets
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from kimi_backend.checkpoint.progress import no_progress
from kimi_backend.errors import InvalidRequestError
from kimi_backend.models.eagle3_draft import Eagle3Draft
from kimi_backend.parallel import SingleRank, TensorParallelGroup
from kimi_backend.runners.aux_buffer import AuxBuffer
from kimi_backend.runners.device_name import device_name
from kimi_backend.runners.eager_proposer import EagerProposer
from kimi_backend.runners.graphs.buckets import Bucket
from kimi_backend.runners.graphs.draft_graphs import DraftGraphs
from kimi_backend.runners.graphs.recorder import Recorder
from kimi_backend.runners.host_transfer import Arrays, to_device, to_host
from kimi_backend.runners.kv_pool import KvPool
from kimi_backend.runners.metadata_builder import MetadataBuilder
from kimi_backend.runners.plan_checks import PlanChecker, RunnerLimits
from kimi_backend.runners.ranks.peers import NO_PEERS, Peers, share
from kimi_backend.runners.sampling_tensors import SamplingUpload, has_processors
from kimi_backend.runners.warm_up import idle_chunk, prefill_lengths
from kimi_backend.types.plan import DraftPlan, DraftReply, DrawnHandle, RunnerDescription, TokenHandle
from kimi_kernels.kernel_set import KernelSet
from kimi_kernels.sampling_inputs import STATUS_NOT_FINITE, STATUS_OK

Tensors = dict[str, torch.Tensor]


class DraftRunner:
    """Runs step plans. Keeps weights and KV, and nothing about sequences.

    With tensor parallelism every rank runs the same plan: rank 0's runner checks it and tells its peers.
    """

    def __init__(
        self,
        model: Eagle3Draft,
        kernels: KernelSet,
        pool: KvPool,
        limits: RunnerLimits,
        dtype: torch.dtype,
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
            dtype: of the computation; aux hidden states in another one are converted.
            split_tokens: see `kimi_kernels.signatures.PlanMlaDecode`.
            pretences: what the description says is not real.
            aux_buffer: the target's, in which a plan names a region; without one, plans bring tensors.
            recorder: makes draft steps repeatable, once `warm_up` has run; None runs every step as it comes.
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
        self._dtype = dtype
        self._device = pool.tensor.device
        self._epoch = secrets.randbits(62)
        self._pretences = pretences
        self._builder = MetadataBuilder(
            kernels=kernels, block_size=pool.block_size, num_mla_heads=model.num_mla_heads, split_tokens=split_tokens
        )
        self._proposer = EagerProposer(model, kernels, pool, self._builder)
        self._checker = PlanChecker(
            limits=limits,
            vocab_size=model.config.vocab_size,
            num_blocks=pool.num_blocks,
            block_size=pool.block_size,
        )
        self._sampling = SamplingUpload(self._device)
        self._aux_buffer = aux_buffer
        self._recorder = recorder
        self._graphs: DraftGraphs | None = None
        if recorder is not None:
            # A graph reads aux hidden states at one address; those that come as a tensor are copied there.
            self._graph_aux = aux_buffer or AuxBuffer.allocate(
                1, limits.max_num_batched_tokens, self._aux_width, dtype, self._device
            )
            self._graphs = DraftGraphs(model, kernels, pool, limits, self._builder, recorder, self._graph_aux)

    def describe(self) -> RunnerDescription:
        """See `DraftModel.describe`."""
        config = self._model.config
        return RunnerDescription(
            role="draft",
            runner_epoch=self._epoch,
            block_size=self._pool.block_size,
            num_blocks=self._pool.num_blocks,
            max_num_batched_tokens=self._limits.max_num_batched_tokens,
            max_num_seqs=self._limits.max_num_seqs,
            max_model_len=self._limits.max_model_len,
            vocab_size=config.vocab_size,
            draft_vocab_size=config.draft_vocab_size,
            aux_layer_ids=config.aux_layer_ids,
            hidden_size=config.target_hidden_size,
            kv_cache_dtype=self._pool.dtype_name,
            device=device_name(self._device),
            pretences=self._pretences,
        )

    @torch.inference_mode()
    def warm_up(self, advance: Callable[[int], None] = no_progress) -> None:
        """As `TargetRunner.warm_up`."""
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
        hidden = self._model.combine_aux(self._graph_aux.all_rows[:num_rows])
        self._model.forward(token_ids, hidden, metadata, self._pool.tensor, self._pool.scale)

    @property
    def num_warm_up_steps(self) -> int:
        """How often `warm_up` advances."""
        return self._graphs.num_buckets + len(prefill_lengths(self._limits)) if self._graphs is not None else 0

    @property
    def left_shape(self) -> tuple[int, int] | None:
        """Of the array that a step leaves its tokens in; None where every step is waited for."""
        return None if self._graphs is None else (self._graphs.left.shape[0], self._graphs.left.shape[1])

    @torch.inference_mode()
    def propose(self, plan: DraftPlan) -> DraftReply:
        """See `DraftModel.propose`. A captured step leaves its tokens on the device where the plan lets it, and is not
        waited for. Only the extended rows' KV is to be counted: the slots after them hold what the single-row steps
        wrote, and the next extension overwrites it.

        Raises:
            InvalidRequestError: a field of the plan is wrong; nothing was run.
        """
        aux = self._aux(plan)
        self._checker.check_draft(plan, aux.shape[0])
        with self.peers.run("propose", plan, self._aux_for_peers(plan, aux)):
            return self._propose(plan, aux)

    def _propose(self, plan: DraftPlan, aux: torch.Tensor) -> DraftReply:
        if self._graphs is not None and not has_processors(plan.sampling):
            bucket = self._graphs.proposal_bucket(plan)
            if bucket is not None:
                return self._propose_captured(self._graphs, bucket, plan, aux)
            extension = self._graphs.extension_bucket(plan)
            if extension is not None and not plan.num_proposals.any():
                return self._extend_captured(self._graphs, extension, plan, aux)
        return self._propose_eagerly(plan, aux)

    @torch.inference_mode()
    def follow(self, plan: DraftPlan) -> DraftReply | None:
        """See `FollowingDraft.follow`.

        Raises:
            InvalidRequestError: a field of the plan is wrong; nothing was run.
        """
        if self._graphs is None or plan.follow is None or has_processors(plan.sampling):
            return None
        aux = self._aux(plan)
        self._checker.check_draft(plan, aux.shape[0])
        extension, proposal = self._graphs.extension_bucket(plan), self._graphs.proposal_bucket(plan)
        if extension is None or proposal is None:
            return None
        follow = plan.follow
        drawn: list[Any] = [follow.drawn.output_token_ids, follow.drawn.num_accepted_tokens]
        shared = [] if self.peers.have_both else drawn
        with self.peers.run("follow", plan, self._aux_for_peers(plan, aux), shared):
            if shared:
                token_ids, accepted = share(self._group, shared)
                follow = replace(follow, drawn=DrawnHandle(output_token_ids=token_ids, num_accepted_tokens=accepted))
            self._graphs.follow(extension, proposal, plan, follow, self._region(plan, aux))
        return self._left(self._graphs, plan)

    def close(self) -> None:
        """End the other ranks and drop what is captured."""
        self.peers.close()
        self.drop_captures()

    def drop_captures(self) -> None:
        """See `TargetRunner.drop_captures`."""
        self._graphs = self._recorder = None

    @property
    def device(self) -> torch.device:
        """That this runner computes on."""
        return self._device

    @property
    def left_tokens(self) -> torch.Tensor | None:
        """Where steps leave their tokens, in the shape of `left_shape`; None where every step is waited for."""
        return None if self._graphs is None else self._graphs.left

    def _aux_for_peers(self, plan: DraftPlan, aux: torch.Tensor) -> torch.Tensor | None:
        """What the step reads of aux hidden states that came as a tensor; in a buffer, every rank has them."""
        if not self.peers.count or plan.aux.region is not None:
            return None
        return aux[: int(plan.aux_rows.max()) + 1]

    def _left(self, graphs: DraftGraphs, plan: DraftPlan) -> DraftReply:
        """The reply to a step that was only queued."""
        num_seqs = len(plan.num_proposals)
        return DraftReply(
            step_id=plan.step_id,
            runner_epoch=self._epoch,
            seq_status=np.zeros(num_seqs, np.int32),
            draft_token_ids=np.empty((0, 0), np.int64),
            tokens=TokenHandle(num_seqs=num_seqs, tensor=graphs.left),
        )

    def _propose_captured(self, graphs: DraftGraphs, bucket: Bucket, plan: DraftPlan, aux: torch.Tensor) -> DraftReply:
        extension = graphs.extension_bucket(plan)
        if extension is not None:
            graphs.extend(extension, plan, self._region(plan, aux))
        else:
            graphs.take_extension(*self._extend(plan, aux, to_device(_extension_arrays(plan), self._device)))
        graphs.propose(bucket, plan)
        if plan.leaves_tokens:
            return self._left(graphs, plan)
        draft_token_ids, seq_status = graphs.drawn(bucket, plan)
        return DraftReply(
            step_id=plan.step_id,
            runner_epoch=self._epoch,
            seq_status=seq_status,
            draft_token_ids=draft_token_ids,
        )

    def _extend_captured(self, graphs: DraftGraphs, bucket: Bucket, plan: DraftPlan, aux: torch.Tensor) -> DraftReply:
        """Nobody wants a proposal: the draft's KV follows the target's."""
        status = _status_of(graphs.only_extend(bucket, plan, self._region(plan, aux)))
        if not plan.leaves_tokens:
            return self._reply(plan, {"seq_status": status})
        graphs.leave(status, torch.empty(0, dtype=torch.int64, device=self._device), None)
        return self._left(graphs, plan)

    def _region(self, plan: DraftPlan, aux: torch.Tensor) -> int:
        """Of the buffer that graphs read; what came as a tensor is copied there."""
        if self._aux_buffer is not None and plan.aux.region is not None:
            return plan.aux.region
        num_read = int(plan.aux_rows.max()) + 1
        self._graph_aux.region(0)[:num_read].copy_(aux[:num_read])
        return 0

    def _propose_eagerly(self, plan: DraftPlan, aux: torch.Tensor) -> DraftReply:
        tensors = to_device(
            {
                **_extension_arrays(plan),
                "proposing": np.flatnonzero(plan.num_proposals),
                "num_proposals": plan.num_proposals,
                "output_index": plan.output_index,
                "greedy": plan.greedy,
            },
            self._device,
        )
        normed, feedback = self._extend(plan, aux, tensors)
        status = _status_of(normed)
        token_ids, proposing = None, tensors["proposing"]
        if plan.num_proposals.any():
            if len(proposing) < len(status):
                normed, feedback = normed[proposing], feedback[proposing]
            token_ids, drawn_status = self._proposer.propose(plan, tensors, self._sampling, normed, feedback)
            status[proposing] = drawn_status
        if plan.leaves_tokens and self._graphs is not None and plan.num_proposals.max() < len(self._graphs.left):
            self._graphs.leave(status, proposing, token_ids)
            return self._left(self._graphs, plan)
        drawn = {} if token_ids is None else {"draft_token_ids": token_ids}
        return self._reply(plan, {"seq_status": status, **drawn})

    @property
    def _aux_width(self) -> int:
        config = self._model.config
        return config.num_aux_hidden_states * config.target_hidden_size

    def _aux(self, plan: DraftPlan) -> torch.Tensor:
        """[rows, num_aux * target hidden size], what the plan's `aux_rows` index."""
        if self._aux_buffer is not None and plan.aux.region is not None:
            return self._aux_buffer.resolve(plan.aux)
        aux, width = plan.aux.tensor, self._aux_width
        if not isinstance(aux, torch.Tensor) or aux.ndim != 2 or aux.shape[1] != width:
            given = list(aux.shape) if isinstance(aux, torch.Tensor) else type(aux).__name__
            raise InvalidRequestError(f"plan aux.tensor: {given} given, a tensor [rows, {width}] is needed")
        return aux.to(self._device, self._dtype)

    def _extend(self, plan: DraftPlan, aux: torch.Tensor, tensors: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows that pair real aux hidden states with the next token; (normed, feedback) of each sequence's last."""
        rows = plan.rows
        metadata = self._builder.build(
            tensors["query_lens"], tensors["seq_lens"], tensors["block_table"], rows.query_lens, rows.seq_lens
        )
        hidden = self._model.combine_aux(aux[tensors["aux_rows"]])
        normed, feedback = self._model.forward(
            tensors["token_ids"], hidden, metadata, self._pool.tensor, self._pool.scale
        )
        return normed[tensors["last_rows"]], feedback[tensors["last_rows"]]

    def _reply(self, plan: DraftPlan, results: Tensors) -> DraftReply:
        arrays = to_host(results)
        return DraftReply(
            step_id=plan.step_id,
            runner_epoch=self._epoch,
            seq_status=arrays["seq_status"],
            draft_token_ids=arrays.get("draft_token_ids", np.empty((0, 0), np.int64)),
        )


def _status_of(normed: torch.Tensor) -> torch.Tensor:
    """[S] int32 of each sequence's last hidden state."""
    return torch.where(normed.isfinite().all(dim=1), STATUS_OK, STATUS_NOT_FINITE).to(torch.int32)


def _extension_arrays(plan: DraftPlan) -> Arrays:
    """What `_extend` reads, by name."""
    rows = plan.rows
    return {
        "token_ids": rows.token_ids,
        "query_lens": rows.query_lens,
        "seq_lens": rows.seq_lens,
        "block_table": rows.block_table,
        "aux_rows": plan.aux_rows,
        "last_rows": np.cumsum(rows.query_lens, dtype=np.int64) - 1,
    }
