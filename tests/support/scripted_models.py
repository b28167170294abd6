"""A target and a draft without weights: logits by script, KV that knows who wrote it, and the plain sampling ops.

They check what a real model cannot: a slot read by another prefix, a rejected or provisional row taken for a valid one,
an aux hidden state of another position. S sequences, T rows, R sampled rows, B sampling sequences, W draft tokens.
"""

import threading
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kimi_backend.errors import ModelUnavailableError
from kimi_backend.types.plan import (
    AuxHandle,
    DraftPlan,
    DraftReply,
    RowPlan,
    RunnerDescription,
    SamplingPlan,
    TargetPlan,
    TargetReply,
)
from kimi_backend.types.step_costs import StepCosts
from kimi_kernels.sampling.plain import sample_tokens, verify_draft_tokens
from kimi_kernels.sampling_inputs import SampleOutput, SamplingInputs, SamplingRows, VocabularyMap
from support.check_errors import AuxMismatchError, StaleSlotError
from support.made_up_costs import linear_costs
from support.scripted_logits import Hashes, LogitScript, mix
from support.slot_store import SlotKind, SlotStore

NO_AUX = np.uint64(0xDEAD)


def describe(role: str, script: LogitScript, **changes: object) -> RunnerDescription:
    """A description that fits its partner unless `changes` say otherwise."""
    values: dict[str, object] = {
        "role": role,
        "runner_epoch": 1,
        "block_size": 4,
        "num_blocks": 256,
        "max_num_batched_tokens": 4096,
        "max_num_seqs": 512,
        "max_model_len": 128,
        "vocab_size": script.vocab_size,
        "draft_vocab_size": script.vocab_size if role == "draft" else None,
        "aux_layer_ids": (2, 30, 58),
        "hidden_size": 64,
        "kv_cache_dtype": "float32",
        "device": "cpu",
    }
    return RunnerDescription(**(values | changes))  # type: ignore[arg-type]


class ScriptedRunner:
    """A runner without weights, of either model: slots, epochs and failures on demand."""

    def __init__(self, description: RunnerDescription, script: LogitScript) -> None:
        self.description = description
        self.script = script
        self.num_steps = self.num_measured = 0
        self.costs = linear_costs(1000, 100) if description.role == "target" else linear_costs(100, 10, 10)
        self.unavailable = False
        self.fail_at_steps: set[int] = set()
        self.checks_slots = True
        """False: it reads whatever is there, so that the tokens alone tell of a fault."""
        self.store = self._empty_store()
        self.violation: StaleSlotError | AuxMismatchError | None = None
        """The first broken rule; kept, because an engine may take the error for a failing runner and go on."""
        self._is_known = True
        self._lock = threading.RLock()  # a restart falls between two steps, whichever thread asks for it

    def describe(self) -> RunnerDescription:
        if self.unavailable:
            raise ModelUnavailableError("not there")
        self._is_known = True
        return self.description

    def measure_costs(self) -> StepCosts:
        if self.unavailable:
            raise ModelUnavailableError("not there")
        self.num_measured += 1
        return self.costs

    def restart(self, num_blocks: int | None = None) -> None:
        """Lose all KV and come back under a new epoch. Steps are answered with garbage until somebody asks who is
        there."""
        with self._lock:
            self._restart(num_blocks)

    def _restart(self, num_blocks: int | None) -> None:
        self._is_known = False
        values = {f.name: getattr(self.description, f.name) for f in fields(self.description)}
        values["runner_epoch"] += 1
        values["num_blocks"] = num_blocks or values["num_blocks"]
        self.description = RunnerDescription(**values)
        self.store = self._empty_store()

    def _empty_store(self) -> SlotStore:
        d = self.description
        return SlotStore(d.num_blocks, d.block_size, d.role)

    def _begin_step(self) -> None:
        self.num_steps += 1
        if self.unavailable or self.num_steps in self.fail_at_steps:
            raise ModelUnavailableError("scripted failure")


@dataclass
class ScriptedTable:
    """The table by which a target and its draft hand tokens to each other without the engine."""

    drawn: dict[int, tuple[int, list[int]]] = field(default_factory=dict)
    """Accepted draft tokens and the tokens drawn, by row."""
    proposed: dict[int, tuple[int, int, list[int]]] = field(default_factory=dict)
    """Step, status and proposals, by row."""
    aux: Hashes | None = None
    """The aux hidden states of the last verify."""


@dataclass(frozen=True)
class ScriptedPending:
    """A step that a runner has run already."""

    in_flight: list[object]
    reply: object

    def wait(self) -> Any:
        assert self.in_flight.pop(0) is self.reply
        return self.reply


def connect(target: object, draft: object) -> None:
    """Let a scripted pair share a table; in other pairs each waits for the other."""
    if isinstance(target, ScriptedTarget) and isinstance(draft, ScriptedDraft):
        draft.tokens = target.tokens


class ScriptedTarget(ScriptedRunner):
    """`Target` by script."""

    depth = 2

    def __init__(self, description: RunnerDescription, script: LogitScript) -> None:
        super().__init__(description, script)
        self.num_behind = 0
        """Steps that were launched before the tokens of the step before were known."""
        self.tokens = ScriptedTable()
        self._in_flight: list[object] = []

    def describe(self) -> RunnerDescription:
        description = super().describe()
        self._in_flight = []
        return description

    def launch(self, plan: TargetPlan) -> ScriptedPending:
        with self._lock:
            self._begin_step()
            self.num_behind += bool((plan.num_given == 0).any())
            reply = self._verify(plan) if self._is_known else self._garbage(plan)
            self._in_flight.append(reply)
            assert len(self._in_flight) <= 2
            return ScriptedPending(self._in_flight, reply)

    def _begin_step(self) -> None:
        try:
            super()._begin_step()
        except ModelUnavailableError:
            self._in_flight = []
            raise

    def _restart(self, num_blocks: int | None) -> None:
        """Begin anew; steps in flight can still be waited for."""
        super()._restart(num_blocks)
        self._in_flight = []
        self.tokens.drawn.clear()

    def _verify(self, plan: TargetPlan) -> TargetReply:
        rows, store = RowGrid(plan.rows, plan, self.tokens), self.store
        last = store.read_prefixes(plan.rows.block_table, rows.starts, checks=self.checks_slots)
        hashes = rows.chain(last)
        slots = store.slots(plan.rows.block_table, rows.positions)
        store.write(
            slots[rows.real], hashes[rows.real], rows.tokens[rows.real], rows.positions[rows.real], SlotKind.VALID
        )
        samples, num_drafts, first_row = self._sample(plan, rows, hashes)
        verified = verify_draft_tokens(
            samples.token_ids,
            samples.status,
            torch.from_numpy(first_row),
            torch.from_numpy(rows.window(plan.num_sampled_rows)),
            torch.from_numpy(num_drafts),
        )
        num_accepted = verified.num_accepted_tokens.numpy()
        sampling = np.flatnonzero(plan.num_sampled_rows)
        num_valid = plan.rows.query_lens.astype(np.int64).copy()
        num_valid[sampling] -= num_drafts - num_accepted
        store.kinds[slots[rows.real & (rows.columns >= num_valid[:, None])]] = SlotKind.REJECTED
        status = np.zeros(len(num_valid), np.int32)
        status[sampling] = verified.status.numpy()
        for row, accepted, tokens in zip(
            plan.table_rows[sampling].tolist(), num_accepted.tolist(), verified.output_token_ids.tolist(), strict=True
        ):
            self.tokens.drawn[row] = accepted, tokens
        self.tokens.aux = np.where(plan.wants_aux[:, None], hashes, NO_AUX)[rows.real]
        return TargetReply(
            step_id=plan.step_id,
            runner_epoch=self.description.runner_epoch,
            seq_status=status,
            output_token_ids=verified.output_token_ids.numpy(),
            num_accepted_tokens=num_accepted,
            aux=AuxHandle(tensor=self.tokens.aux),
            draft_status=self._draft_status(plan),
            **_logprobs(samples, first_row, num_drafts),
        )

    def _garbage(self, plan: TargetPlan) -> TargetReply:
        counts = plan.num_sampled_rows[plan.num_sampled_rows > 0]
        return TargetReply(
            step_id=plan.step_id,
            runner_epoch=self.description.runner_epoch,
            seq_status=np.zeros(len(plan.num_sampled_rows), np.int32),
            output_token_ids=np.zeros((len(counts), int(counts.max(initial=1))), np.int64),
            num_accepted_tokens=np.zeros(len(counts), np.int32),
            aux=AuxHandle(),
            draft_status=self._draft_status(plan),
        )

    def _draft_status(self, plan: TargetPlan) -> npt.NDArray[np.int32] | None:
        if not plan.draft_step:
            return None
        said = [self.tokens.proposed.get(row, (0, 1, [])) for row in plan.table_rows.tolist()]
        return np.array([status if step == plan.draft_step else 1 for step, status, _ in said], np.int32)

    def _sample(
        self, plan: TargetPlan, rows: "RowGrid", hashes: Hashes
    ) -> tuple[SampleOutput, npt.NDArray[np.int32], npt.NDArray[np.int64]]:
        num_sampled = plan.num_sampled_rows
        is_sampled = rows.real & (rows.columns >= (plan.rows.query_lens - num_sampled)[:, None])
        counts = num_sampled[num_sampled > 0]
        first_row = np.cumsum(counts, dtype=np.int64) - counts
        logits = self.script.logits(hashes[is_sampled])
        if self.script.nan_token_id is not None:
            logits[rows.tokens[is_sampled] == self.script.nan_token_id] = np.nan
        window_len = np.arange(is_sampled.sum()) - np.repeat(first_row, counts)
        sampling_rows = SamplingRows(
            sequence=torch.from_numpy(np.repeat(np.arange(len(counts)), counts)),
            token_index=torch.from_numpy(rows.positions[is_sampled] + 1),
            window_token_ids=torch.from_numpy(rows.window(num_sampled)),
            window_len=torch.from_numpy(window_len.astype(np.int32)),
            **_masks(plan, int(is_sampled.sum())),
        )
        samples = self.sample(torch.from_numpy(logits), plan.sampling, sampling_rows, plan.num_logprobs)
        return samples, (counts - 1).astype(np.int32), first_row

    def sample(
        self, logits: torch.Tensor, sampling: SamplingPlan, rows: SamplingRows, num_logprobs: int | None
    ) -> SampleOutput:
        """Overridden by tests that plant a fault."""
        return sample_tokens(logits, sampling_inputs(sampling), rows, num_logprobs=num_logprobs)


class ScriptedDraft(ScriptedRunner):
    """`Draft` by script: the target's logits for a share of the prefixes, others for the rest."""

    def __init__(
        self,
        description: RunnerDescription,
        script: LogitScript,
        agreement: float = 0.7,
        token_id_of_column: npt.NDArray[np.int64] | None = None,
        in_table: bool = True,
    ) -> None:
        """
        Args:
            in_table: whether it leaves its tokens for the target when it may.
            agreement: share of prefixes at which the draft's distribution is the target's.
            token_id_of_column: [num_columns] target ids in the draft's order; None: the target's own order.
        """
        super().__init__(description, script)
        self._agreement = np.uint64(int(agreement * 2**32))
        self._other = LogitScript(script.vocab_size, script.salt + 1, script.scales)
        self.vocabulary_map = None if token_id_of_column is None else _vocabulary_map(token_id_of_column, script)
        self.nan_token_id: int | None = None
        self.tokens: ScriptedTable | None = None
        """The target's, see `connect`."""
        self._in_table = in_table
        self._in_flight: list[object] = []
        self.num_overlapped = 0
        """Steps that were launched before it was known what their verify accepted."""

    @property
    def depth(self) -> int:
        return int(self._in_table and self.tokens is not None)

    def launch(self, plan: DraftPlan) -> ScriptedPending:
        """Launch as the runners do on the device: rejected rows write provisional slots, the others are those of a plan
        that was made with the verify's results."""
        with self._lock:
            self._begin_step()
            try:
                reply = self.propose(plan) if self._is_known else self._garbage(plan)
            except (StaleSlotError, AuxMismatchError) as error:
                self.violation = self.violation or error
                raise
            self._in_flight = [reply]
            return ScriptedPending(self._in_flight, reply)

    def propose(self, plan: DraftPlan) -> DraftReply:
        """Overridden by tests that plant a fault."""
        if not plan.num_drawn.any():
            return self._propose(plan)
        assert self.tokens is not None
        self.num_overlapped += 1
        found = [self.tokens.drawn.get(row, (0, [0])) for row in plan.table_rows.tolist()]
        drawn = np.zeros((len(found), max(len(tokens) for _, tokens in found)), np.int64)
        for index, (_, tokens) in enumerate(found):
            drawn[index, : len(tokens)] = tokens
        known = plan.resolved(drawn, np.array([accepted for accepted, _ in found], np.int32))
        rows = RowGrid(plan.rows)
        slots = self.store.slots(plan.rows.block_table, rows.positions)
        rejected = rows.real & (rows.columns >= known.rows.query_lens[:, None])
        self.store.write(
            slots[rejected],
            mix(np.uint64(1), slots[rejected]),
            slots[rejected],
            rows.positions[rejected],
            SlotKind.PROVISIONAL,
        )
        return self._propose(known)

    def _propose(self, plan: DraftPlan) -> DraftReply:
        rows, store = RowGrid(plan.rows), self.store
        aux = np.zeros(rows.real.shape, np.uint64)
        given = self.tokens.aux if plan.aux.tensor is None and self.tokens is not None else plan.aux.tensor
        aux[rows.real] = given[plan.aux_rows]  # type: ignore[index]
        before = store.read_prefixes(plan.rows.block_table, rows.starts, checks=self.checks_slots)
        hashes = mix(aux, rows.tokens)  # through token p + 1
        previous = np.concatenate([before[:, None], hashes[:, :-1]], axis=1)
        has_row_before = rows.real & (rows.positions > 0)
        if self.checks_slots and (has_row_before & (previous != aux)).any():
            raise AuxMismatchError("draft: a row's aux hidden state is not that of its own prefix")
        slots = store.slots(plan.rows.block_table, rows.positions)
        store.write(
            slots[rows.real], hashes[rows.real], rows.tokens[rows.real], rows.positions[rows.real], SlotKind.VALID
        )
        last = hashes[np.arange(len(hashes)), plan.rows.query_lens - 1]
        proposals, status = self._propose_all(plan, last)
        if plan.in_table and self.tokens is not None:
            given = iter(proposals.tolist())
            for row, count, failed in zip(
                plan.table_rows.tolist(), plan.num_proposals.tolist(), status.tolist(), strict=True
            ):
                tokens = next(given) if count else []
                self.tokens.proposed[row] = plan.step_id, failed, [-1] * len(tokens) if failed else tokens
        return DraftReply(
            step_id=plan.step_id,
            runner_epoch=self.description.runner_epoch,
            seq_status=np.zeros_like(status) if plan.in_table else status,
            draft_token_ids=None if plan.in_table else proposals,
        )

    def _garbage(self, plan: DraftPlan) -> DraftReply:
        counts = plan.num_proposals[plan.num_proposals > 0]
        return DraftReply(
            step_id=plan.step_id,
            runner_epoch=self.description.runner_epoch,
            seq_status=np.zeros(len(plan.num_proposals), np.int32),
            draft_token_ids=np.zeros((len(counts), int(counts.max(initial=0))), np.int64),
        )

    def _propose_all(self, plan: DraftPlan, last: Hashes) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int32]]:
        proposing = np.flatnonzero(plan.num_proposals)
        # One draw tells whether the extension was finite, of those too that want none any more.
        counts = np.maximum(plan.num_wanted[proposing], 1)
        width = int(counts.max(initial=0))
        proposals = np.full((len(proposing), width), -1, np.int64)
        status = np.zeros(len(plan.num_proposals), np.int32)
        hashes = last[proposing]
        for step in range(width):
            active = np.flatnonzero(counts > step)
            drawn, row_status = self._propose_one(plan, active, proposals, hashes[active], step)
            failed = (row_status != 0) | (drawn == self.nan_token_id)
            status[proposing[active[failed]]] = 1
            proposals[active, step] = drawn
            hashes[active] = mix(hashes[active], np.maximum(drawn, 0))
            more = active[counts[active] > step + 1]
            positions = plan.rows.seq_lens[proposing[more]].astype(np.int64) + step
            slots = self.store.slots(plan.rows.block_table[proposing[more]], positions[:, None])[:, 0]
            self.store.write(slots, hashes[more], proposals[more, step], positions, SlotKind.PROVISIONAL)
        proposals[np.arange(width) >= plan.num_wanted[proposing][:, None]] = -1
        return proposals, status

    def _propose_one(
        self,
        plan: DraftPlan,
        active: npt.NDArray[np.int64],
        proposals: npt.NDArray[np.int64],
        hashes: Hashes,
        step: int,
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int32]]:
        logits = self.logits(hashes)
        if self.vocabulary_map is not None:
            logits = logits[:, self.vocabulary_map.token_id_of_column.numpy()]
        rows = SamplingRows(
            sequence=torch.from_numpy(active),
            token_index=torch.from_numpy(plan.output_index[active] + step),
            window_token_ids=torch.from_numpy(proposals[:, :step].astype(np.int32)),
            window_len=torch.full((len(active),), step, dtype=torch.int32),
        )
        inputs = sampling_inputs(plan.sampling)
        samples = sample_tokens(torch.from_numpy(logits), inputs, rows, self.vocabulary_map)
        return samples.token_ids.numpy(), samples.status.numpy()

    def logits(self, hashes: Hashes) -> npt.NDArray[np.float32]:
        """[R, vocab_size] in the target's order."""
        agrees = (mix(hashes, np.full(len(hashes), 77)) >> np.uint64(32)) < self._agreement
        return np.where(agrees[:, None], self.script.logits(hashes), self._other.logits(hashes))


class RowGrid:
    """A plan's ragged rows as [S, longest] arrays; `real` marks the rows that exist."""

    def __init__(self, rows: RowPlan, plan: TargetPlan | None = None, table: ScriptedTable | None = None) -> None:
        """plan, table: of a target's step, whose rows may embed tokens of the table."""
        query_lens = rows.query_lens.astype(np.int64)
        self.starts = rows.seq_lens.astype(np.int64) - query_lens
        self.columns = np.broadcast_to(np.arange(query_lens.max()), (len(query_lens), query_lens.max()))
        self.real = self.columns < query_lens[:, None]
        self.positions = np.where(self.real, self.starts[:, None] + self.columns, 0)
        self.tokens = np.zeros(self.real.shape, np.int64)
        self.tokens[self.real] = rows.token_ids
        self._checked = self.tokens.copy()
        if plan is not None and table is not None and plan.reads_table:
            for index in np.flatnonzero(plan.num_given < query_lens).tolist():
                count, row, num_given = int(query_lens[index]), int(plan.table_rows[index]), int(plan.num_given[index])
                accepted, drawn = table.drawn.get(row, (0, [0]))
                step, _, proposals = table.proposed.get(row, (0, 1, []))
                held = [drawn[accepted], *(proposals if step == plan.draft_step else [])] + [-1] * count
                first = count - int(plan.num_sampled_rows[index])
                self._checked[index, num_given:count] = held[num_given - first : count - first]
            self.tokens = np.maximum(self._checked, 0)

    def chain(self, last: Hashes) -> Hashes:
        """[S, longest] hash of each row's prefix, given that of the prefix before the rows."""
        hashes = np.empty(self.real.shape, np.uint64)
        for column in range(self.real.shape[1]):
            last = hashes[:, column] = mix(last, self.tokens[:, column])
        return hashes

    def window(self, num_sampled: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        """[B, W] draft tokens under verification: all sampled rows of a sequence but its first."""
        sampling = np.flatnonzero(num_sampled)
        width = int(num_sampled.max(initial=1)) - 1
        window = np.full((len(sampling), max(width, 0)), -1, np.int32)
        for index, sequence in enumerate(sampling.tolist()):
            count = int(num_sampled[sequence]) - 1
            if count:
                end = int(self.real[sequence].sum())
                window[index, :count] = self._checked[sequence, end - count : end]
        return window


def sampling_inputs(plan: SamplingPlan) -> SamplingInputs:
    """The plan's arrays as tensors of the same names."""
    values = {f.name: torch.from_numpy(np.require(getattr(plan, f.name), None, ["C", "W"])) for f in fields(plan)}
    return SamplingInputs(**values)


def _masks(plan: TargetPlan, num_rows: int) -> dict[str, torch.Tensor]:
    if plan.logit_mask is None or plan.masked_rows is None:
        return {}
    of_row = np.full(num_rows, -1, np.int32)
    of_row[plan.masked_rows] = np.arange(len(plan.masked_rows))
    return {"logit_mask": torch.from_numpy(plan.logit_mask), "mask_of_row": torch.from_numpy(of_row)}


def _vocabulary_map(token_id_of_column: npt.NDArray[np.int64], script: LogitScript) -> VocabularyMap:
    column_of_token_id = np.full(script.vocab_size, -1, np.int64)
    column_of_token_id[token_id_of_column] = np.arange(len(token_id_of_column))
    return VocabularyMap(
        token_id_of_column=torch.from_numpy(token_id_of_column), column_of_token_id=torch.from_numpy(column_of_token_id)
    )


def _logprobs(
    samples: SampleOutput, first_row: npt.NDArray[np.int64], num_drafts: npt.NDArray[np.int32]
) -> dict[str, npt.NDArray]:
    if samples.logprobs is None:
        return {}
    assert samples.top_logprob_ids is not None
    assert samples.top_logprobs is not None
    place = np.arange(int(num_drafts.max(initial=0)) + 1)
    row = first_row[:, None] + place * (place <= num_drafts[:, None])
    return {
        "logprobs": samples.logprobs.numpy()[row],
        "top_logprob_ids": samples.top_logprob_ids.numpy()[row],
        "top_logprobs": samples.top_logprobs.numpy()[row],
    }
