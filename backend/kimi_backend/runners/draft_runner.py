"""`DraftRunner`: an EAGLE3 draft behind the `Draft` Protocol, in the process that calls it."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from typing_extensions import Unpack

from kimi_backend.errors import InvalidRequestError
from kimi_backend.models.eagle3_draft import Eagle3Draft
from kimi_backend.runners.aux_buffer import AuxBuffer
from kimi_backend.runners.eager_proposer import EagerProposer
from kimi_backend.runners.graphs.draft_graphs import DraftGraphs
from kimi_backend.runners.graphs.static_arrays import ArrivingWords
from kimi_backend.runners.hand_over.token_table import TokenTable, share
from kimi_backend.runners.host_transfer import Arrays, to_device, to_host
from kimi_backend.runners.kv_pool import KvPool
from kimi_backend.runners.plan_checks import RunnerLimits
from kimi_backend.runners.sampling_tensors import has_processors
from kimi_backend.runners.step_runner import Launched, Options, StepRunner, Tensors
from kimi_backend.runners.step_timing import draft_plan
from kimi_backend.runners.warm_up import idle_chunk
from kimi_backend.types.plan import PLACEHOLDER_TOKEN_ID, AuxHandle, DraftPlan, DraftReply, RowPlan
from kimi_kernels.kernel_set import KernelSet
from kimi_kernels.sampling_inputs import STATUS_NOT_FINITE, STATUS_OK
from kimi_kernels.token_table import PROPOSALS, STATUS, stamp_of


class DraftRunner(StepRunner):
    """Runs step plans of a draft."""

    def __init__(
        self,
        model: Eagle3Draft,
        kernels: KernelSet,
        pool: KvPool,
        limits: RunnerLimits,
        dtype: torch.dtype,
        **options: Unpack[Options],
    ) -> None:
        """dtype: of the computation; aux hidden states in another one are converted."""
        super().__init__(model.config, kernels, pool, limits, model.num_mla_heads, options)
        self._model, self._dtype = model, dtype
        config = model.config
        self._description = replace(
            self._description,
            role="draft",
            draft_vocab_size=config.draft_vocab_size,
            aux_layer_ids=config.aux_layer_ids,
            hidden_size=config.target_hidden_size,
        )
        self._aux_width = config.num_aux_hidden_states * config.target_hidden_size
        self._proposer = EagerProposer(model, kernels, pool, self._builder)
        self.timing_aux: AuxHandle | None = None
        """The buffer of another process that steps are timed with, where one is open."""
        self._graphs: DraftGraphs | None = None
        if self._recorder is None or self.table is None:
            return
        # A graph reads aux hidden states at one address; those that come as a tensor are copied there.
        self._graph_aux = self.aux_buffer or AuxBuffer.allocate(
            1, limits.max_num_batched_tokens, self._aux_width, dtype, self.device
        )
        self._graphs = DraftGraphs(
            model, kernels, pool, limits, self._builder, self._recorder, self._graph_aux, self.table
        )

    @property
    def depth(self) -> int:
        """See `Draft.depth`."""
        return 0 if self._graphs is None else 1

    @torch.inference_mode()
    def launch(self, plan: DraftPlan) -> Launched[DraftReply]:
        """See `Draft.launch`. Only the extended rows' KV is to be counted: the slots after them hold what the
        single-row steps wrote, and the next extension overwrites it.

        Raises:
            InvalidRequestError: a field of the plan is wrong; nothing was run.
        """
        aux = self._aux(plan)
        self._checker.check_draft(plan, aux.shape[0])
        with self.workers.run(plan, self._aux_for_workers(plan, aux)):
            if self.table is not None and self.table.is_split and plan.num_drawn.any():
                share(self.table.drawn, self._group)
            if self._graphs is None or self.table is None or has_processors(plan.sampling):
                return self._launch_eagerly(self._resolved(plan), aux)
            return self._launch_captured(self._graphs, self.table, plan, aux)

    def drop_captures(self) -> None:
        """See `StepRunner.drop_captures`."""
        self._graphs = self._recorder = None

    def _captured(self) -> DraftGraphs | None:
        return self._graphs

    def _run_idle_chunk(self, num_rows: int) -> None:
        token_ids, metadata = idle_chunk(self._builder, self._pool, num_rows, self._limits.max_model_len)
        hidden = self._model.combine_aux(self._graph_aux.all_rows[:num_rows])
        self._model.forward(token_ids, hidden, metadata, self._pool.tensor, self._pool.scale)

    def _launch_timed(self, rows: RowPlan, num_proposals: int) -> Launched[DraftReply]:
        aux = self.timing_aux
        if aux is None and self.aux_buffer is not None:
            aux = AuxHandle(region=0)
        elif aux is None:
            shape = len(rows.token_ids), self._aux_width
            aux = AuxHandle(tensor=torch.zeros(shape, dtype=self._dtype, device=self.device))
        return self.launch(draft_plan(rows, num_proposals, aux, in_table=self._graphs is not None))

    def _aux_for_workers(self, plan: DraftPlan, aux: torch.Tensor) -> torch.Tensor | None:
        """Return the aux hidden states that workers need, which came as a tensor; in a buffer, every rank has them."""
        if not self.workers.count or plan.aux.region is not None:
            return None
        return aux[: int(plan.aux_rows.max()) + 1]

    def _resolved(self, plan: DraftPlan) -> DraftPlan:
        """The plan with what the verify drew put in. Waits for it, if the plan does not have it."""
        if self.table is None or not plan.num_drawn.any():
            return plan
        rows = self.table.drawn[torch.from_numpy(plan.table_rows.astype(np.int64)).to(self.device)].cpu().numpy()
        return plan.resolved(rows[:, 1:], rows[:, 0])

    def _launch_captured(
        self, graphs: DraftGraphs, table: TokenTable, plan: DraftPlan, aux: torch.Tensor
    ) -> Launched[DraftReply]:
        is_proposing = bool(plan.num_wanted.any())
        extension, proposal = graphs.extension_bucket(plan), graphs.proposal_bucket(plan)
        if (proposal if is_proposing else extension) is None:
            return self._launch_eagerly(self._resolved(plan), aux)
        if extension is None:
            plan = self._resolved(plan)
        graphs.begin(plan)
        if extension is None:
            graphs.take_extension(*self._extend(plan, aux, to_device(_extension_arrays(plan), self.device)))
        else:
            normed = graphs.extend(extension, plan, self._region(plan, aux))
        if proposal is not None:
            graphs.propose(proposal, plan)
            if plan.in_table:
                return self._left(plan)
            return Launched(partial(self._reply, plan, partial(_proposals, plan, graphs.send(proposal, plan))))
        status = _status_of(normed)
        if not plan.in_table:
            return Launched(partial(self._reply, plan, partial(to_host, {"seq_status": status})))
        self._leave(table, plan, status, None)
        return self._left(plan)

    def _launch_eagerly(self, plan: DraftPlan, aux: torch.Tensor) -> Launched[DraftReply]:
        tensors = to_device(
            {
                **_extension_arrays(plan),
                "proposing": np.flatnonzero(plan.num_proposals),
                "num_proposals": plan.num_wanted,
                "output_index": plan.output_index,
            },
            self.device,
        )
        normed, feedback = self._extend(plan, aux, tensors)
        status = _status_of(normed)
        token_ids, proposing = None, tensors["proposing"]
        if plan.num_wanted.any():
            if len(proposing) < len(status):
                normed, feedback = normed[proposing], feedback[proposing]
            token_ids, drawn_status = self._proposer.propose(plan, tensors, self._sampling, normed, feedback)
            status[proposing] = torch.where(status[proposing] == STATUS_OK, drawn_status, status[proposing])
        if plan.in_table and self.table is not None:
            self._leave(self.table, plan, status, token_ids)
            return self._left(plan)
        drawn = {} if token_ids is None else {"draft_token_ids": token_ids}
        return Launched(partial(self._reply, plan, partial(to_host, {"seq_status": status, **drawn})))

    def _leave(self, table: TokenTable, plan: DraftPlan, status: torch.Tensor, token_ids: torch.Tensor | None) -> None:
        """Put in the table what a step that ran eagerly has drawn: status [S], tokens [B, W] of those that propose."""
        width = 1 if token_ids is None else token_ids.shape[1]
        shape = (width, len(status))
        by_draw = torch.full(shape, PLACEHOLDER_TOKEN_ID, dtype=torch.int64, device=self.device)
        counts = torch.zeros(shape, dtype=torch.int32, device=self.device)
        counts[0] = 1
        arrays = {"proposing": np.flatnonzero(plan.num_proposals), "table_rows": plan.table_rows.astype(np.int64)}
        step = to_device({**arrays, "stamp": np.array([stamp_of(plan.step_id)], np.int32)}, self.device)
        if token_ids is not None:
            by_draw[:, step["proposing"]] = token_ids.T
        step |= {"is_wanted": (by_draw != PLACEHOLDER_TOKEN_ID).to(torch.int32), "counts": counts}
        self._ops.store_proposals(by_draw, status.expand(shape).contiguous(), step, table.proposed)

    def _left(self, plan: DraftPlan) -> Launched[DraftReply]:
        """The reply to a step that leaves everything in the table."""
        return Launched(partial(self._reply, plan, dict))

    def _region(self, plan: DraftPlan, aux: torch.Tensor) -> int:
        """Find the region of the buffer that graphs read; what came as a tensor is copied there."""
        if self.aux_buffer is not None and plan.aux.region is not None:
            return plan.aux.region
        num_read = int(plan.aux_rows.max()) + 1
        self._graph_aux.region(0)[:num_read].copy_(aux[:num_read])
        return 0

    def _aux(self, plan: DraftPlan) -> torch.Tensor:
        """[rows, num_aux * target hidden size], what the plan's `aux_rows` index."""
        if self.aux_buffer is not None and plan.aux.region is not None:
            return self.aux_buffer.resolve(plan.aux)
        aux, width = plan.aux.tensor, self._aux_width
        if not isinstance(aux, torch.Tensor) or aux.ndim != 2 or aux.shape[1] != width:
            given = list(aux.shape) if isinstance(aux, torch.Tensor) else type(aux).__name__
            raise InvalidRequestError(f"plan aux.tensor: {given} given, a tensor [rows, {width}] is needed")
        return aux.to(self.device, self._dtype)

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

    def _reply(self, plan: DraftPlan, fetch: Callable[[], Arrays]) -> DraftReply:
        """fetch: waits for the step's results; nothing comes of one that leaves them in the table."""
        arrays = fetch()
        nothing = np.empty((int(np.count_nonzero(plan.num_proposals)), 0), np.int64)
        return DraftReply(
            step_id=plan.step_id,
            runner_epoch=self._description.runner_epoch,
            seq_status=arrays.get("seq_status", np.zeros(len(plan.num_proposals), np.int32)),
            draft_token_ids=arrays.get("draft_token_ids", nothing) if arrays else None,
        )


def _proposals(plan: DraftPlan, arriving: ArrivingWords) -> Arrays:
    """Read what a captured step has left in the table."""
    rows = arriving.wait().reshape(len(plan.table_rows), -1)
    drawn = rows[plan.num_proposals > 0, PROPOSALS : PROPOSALS + int(plan.num_wanted.max())]
    return {"seq_status": rows[:, STATUS], "draft_token_ids": drawn.astype(np.int64)}


def _status_of(normed: torch.Tensor) -> torch.Tensor:
    """[S] int32 of each sequence's last hidden state."""
    return torch.where(normed.isfinite().all(dim=1), STATUS_OK, STATUS_NOT_FINITE).to(torch.int32)


def _extension_arrays(plan: DraftPlan) -> Arrays:
    """Name the arrays that `_extend` reads."""
    rows = plan.rows
    return {
        "token_ids": rows.token_ids,
        "query_lens": rows.query_lens,
        "seq_lens": rows.seq_lens,
        "block_table": rows.block_table,
        "aux_rows": plan.aux_rows,
        "last_rows": np.cumsum(rows.query_lens, dtype=np.int64) - 1,
    }
