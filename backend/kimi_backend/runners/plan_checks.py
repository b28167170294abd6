"""A step plan is checked before any of it reaches a kernel: a wrong index there reads or writes what is not ours.

Every message names the field, the value and what is allowed.
"""

from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from kimi_backend.errors import ConfigError, InvalidRequestError
from kimi_backend.types.plan import DraftPlan, Int32Array, RowPlan, SamplingPlan, TargetPlan
from kimi_backend.types.request import MAX_SPECULATIVE_TOKENS
from kimi_backend.types.scoring import ScoringPlan

IntegerArray = npt.NDArray[np.integer[Any]]

_PER_SEQUENCE = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "seed",
    "repetition_penalty",
    "frequency_penalty",
    "presence_penalty",
    "history_tail",
)
# Offsets, and the flat arrays that they cut.
_CSRS = (
    ("penalty_offsets", ("penalty_ids", "penalty_counts", "penalty_in_prompt")),
    ("bias_offsets", ("bias_ids", "bias_values")),
    ("ban_offsets", ("ban_ids", "ban_until")),
)
FEW = 32
"""Numbers that Python compares in less time than numpy takes to begin."""
_TOKEN_IDS = ("penalty_ids", "bias_ids", "ban_ids", "bad_word_tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerLimits:
    """The most that a runner takes in a step."""

    max_num_batched_tokens: int
    max_num_seqs: int
    max_model_len: int
    max_speculative_tokens: int = MAX_SPECULATIVE_TOKENS
    """Most draft tokens of a sequence in a step that is captured; more run eagerly."""
    capture_batch_sizes: tuple[int, ...] = ()
    """Numbers of sequences that steps are captured for, besides max_num_seqs; empty: `buckets.batch_sizes`."""

    def check_positions(self, max_position_embeddings: int) -> None:
        """Raises ConfigError unless the model's rotary table covers max_model_len."""
        if self.max_model_len > max_position_embeddings:
            raise ConfigError(
                f"max_model_len: {self.max_model_len} given, at most {max_position_embeddings}"
                " (the checkpoint's max_position_embeddings) allowed"
            )


def slots_needed(plan: DraftPlan) -> Int32Array:
    """[S] slots that each sequence's blocks must cover: those of its rows, and of the steps after them.

    Most are needed when everything is accepted: one accepted token more moves the steps on by one, and takes away at
    most one of them.
    """
    proposals = np.minimum(plan.num_proposals, plan.room - np.maximum(plan.num_drawn - 1, 0))
    needed: Int32Array = plan.rows.seq_lens + np.maximum(proposals - 1, 0)
    return needed


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanChecker:
    """Checks plans against one runner's limits and pool."""

    limits: RunnerLimits
    vocab_size: int
    num_blocks: int
    block_size: int
    has_table: bool = False
    """True if the runner has a token table."""
    _approved: list[SamplingPlan] = field(default_factory=list, init=False, repr=False, compare=False)
    """The last sampling parameters that passed: a frozen object, and mostly the next step's too."""

    def check_target(self, plan: TargetPlan) -> None:
        """Raises InvalidRequestError unless the plan can run."""
        rows = plan.rows
        self._check_rows(rows, rows.seq_lens)
        num_seqs = len(rows.query_lens)
        sampled = plan.num_sampled_rows
        _expect_shape("num_sampled_rows", sampled, (num_seqs,))
        _expect_shape("wants_aux", plan.wants_aux, (num_seqs,))
        allowed = np.minimum(rows.query_lens, MAX_SPECULATIVE_TOKENS + 1)
        _expect_within("num_sampled_rows", sampled, 0, allowed, "query_lens and at most 8")
        self._check_sampling(plan.sampling, int(np.count_nonzero(sampled)))
        if plan.num_logprobs is not None and not 0 <= plan.num_logprobs <= self.vocab_size:
            raise InvalidRequestError(f"plan num_logprobs: {plan.num_logprobs} given, 0 to {self.vocab_size} allowed")
        if plan.logit_mask is not None or plan.masked_rows is not None:
            self._check_masks(plan.logit_mask, plan.masked_rows, int(sampled.sum()))
        if plan.scoring is not None:
            self._check_scoring(plan.scoring, len(rows.token_ids))
        _expect_shape("num_given", plan.num_given, (num_seqs,))
        self._check_table_rows(plan, uses_table=plan.draft_step != 0 or bool((plan.num_given < rows.query_lens).any()))
        most = np.minimum(sampled, self.limits.max_speculative_tokens + 1)
        _expect_within("num_given", plan.num_given, rows.query_lens - most, rows.query_lens, "of query_lens")

    def _check_table_rows(self, plan: TargetPlan | DraftPlan, *, uses_table: bool) -> None:
        if uses_table and not self.has_table:
            raise InvalidRequestError("plan: tokens of the token table wanted, but this runner has none")
        _expect_shape("table_rows", plan.table_rows, plan.rows.query_lens.shape)
        _expect_within("table_rows", plan.table_rows, 0, self.limits.max_num_seqs - 1)

    def check_draft(self, plan: DraftPlan, num_aux_rows: int) -> None:
        """Raises InvalidRequestError unless the plan can run. num_aux_rows: rows of the aux hidden states given."""
        rows, proposals = plan.rows, plan.num_proposals
        _expect_shape("num_proposals", proposals, (len(rows.query_lens),))
        _expect_within("num_proposals", proposals, 0, MAX_SPECULATIVE_TOKENS)
        self._check_table_rows(plan, uses_table=plan.in_table or bool(plan.num_drawn.any()))
        for name in ("num_drawn", "room"):
            _expect_shape(name, getattr(plan, name), rows.query_lens.shape)
        _expect_within("room", plan.room, -MAX_SPECULATIVE_TOKENS - 2, self.limits.max_model_len)
        allowed = np.minimum(rows.query_lens, self.limits.max_speculative_tokens + 1)
        _expect_within("num_drawn", plan.num_drawn, 0, allowed, "query_lens and at most a verify's")
        _expect_shape("query_lens", rows.query_lens, proposals.shape)
        _expect_shape("seq_lens", rows.seq_lens, proposals.shape)
        self._check_rows(rows, slots_needed(plan))
        _expect_shape("aux_rows", plan.aux_rows, rows.token_ids.shape)
        _expect_within("aux_rows", plan.aux_rows, 0, num_aux_rows - 1)
        num_proposing = int(np.count_nonzero(proposals))
        _expect_shape("output_index", plan.output_index, (num_proposing,))
        unaccepted = rows.seq_lens - np.maximum(plan.num_drawn - 1, 0)
        expected = unaccepted[proposals > 0].astype(np.int64) + 1
        _expect_within("output_index", plan.output_index, 0, self.limits.max_model_len + MAX_SPECULATIVE_TOKENS)
        is_wrong = plan.output_index < expected
        if is_wrong.any():
            wrong = np.flatnonzero(is_wrong)
            raise InvalidRequestError(
                f"plan output_index[{wrong[0]}]: {plan.output_index[wrong[0]]} given,"
                f" at least {expected[wrong[0]]} (seq_len + 1) is allowed"
            )
        self._check_sampling(plan.sampling, num_proposing)

    def _check_masks(self, masks: Int32Array | None, rows: Int32Array | None, num_rows: int) -> None:
        if masks is None or rows is None:
            missing = "logit_mask" if masks is None else "masked_rows"
            raise InvalidRequestError(f"plan {missing}: not given, logit_mask and masked_rows go together")
        _expect_shape("masked_rows", rows, (rows.size,))
        _expect_shape("logit_mask", masks, (len(rows), -(-self.vocab_size // 32)))
        _expect_within("masked_rows", rows, 0, num_rows - 1)
        if len(rows) > 1 and np.diff(rows).min() < 1:
            raise InvalidRequestError(f"plan masked_rows: {rows[:8].tolist()} given, rows that rise are allowed")

    def _check_scoring(self, plan: ScoringPlan, num_rows: int) -> None:
        _expect_shape("scoring.rows", plan.rows, (plan.rows.size,))
        _expect_shape("scoring.token_ids", plan.token_ids, plan.rows.shape)
        _expect_within("scoring.rows", plan.rows, 0, num_rows - 1)
        _expect_within("scoring.token_ids", plan.token_ids, 0, self.vocab_size - 1)
        if not plan.rows.size or (len(plan.rows) > 1 and np.diff(plan.rows).min() < 1):
            raise InvalidRequestError(f"plan scoring.rows: {plan.rows[:8].tolist()} given, rows that rise are allowed")
        if not 0 <= plan.num_top <= self.vocab_size:
            raise InvalidRequestError(f"plan scoring.num_top: {plan.num_top} given, 0 to {self.vocab_size} allowed")

    def _check_rows(self, rows: RowPlan, slots_needed: npt.NDArray[np.int32]) -> None:
        """slots_needed: [S] slots that the sequence's blocks must cover."""
        num_seqs = len(rows.query_lens)
        if not 1 <= num_seqs <= self.limits.max_num_seqs:
            raise InvalidRequestError(
                f"plan query_lens: {num_seqs} sequences given, 1 to {self.limits.max_num_seqs} allowed"
            )
        _expect_shape("query_lens", rows.query_lens, (num_seqs,))
        _expect_shape("seq_lens", rows.seq_lens, (num_seqs,))
        _expect_within("query_lens", rows.query_lens, 1, self.limits.max_num_batched_tokens)
        _expect_shape("token_ids", rows.token_ids, (int(rows.query_lens.sum()),))
        if len(rows.token_ids) > self.limits.max_num_batched_tokens:
            raise InvalidRequestError(
                f"plan token_ids: {len(rows.token_ids)} rows given,"
                f" at most {self.limits.max_num_batched_tokens} (max_num_batched_tokens) allowed"
            )
        _expect_within("token_ids", rows.token_ids, 0, self.vocab_size - 1)
        _expect_within("seq_lens", rows.seq_lens, rows.query_lens, self.limits.max_model_len, "from query_lens up")
        _expect_within("slots needed (seq_lens plus proposals)", slots_needed, 1, self.limits.max_model_len)
        self._check_blocks(rows, slots_needed)

    def _check_blocks(self, rows: RowPlan, slots_needed: npt.NDArray[np.int32]) -> None:
        blocks_needed = -(-slots_needed // self.block_size)
        table = rows.block_table
        if table.ndim != 2 or table.shape[0] != len(rows.query_lens) or table.shape[1] < blocks_needed.max():
            raise InvalidRequestError(
                f"plan block_table: shape {list(table.shape)} given,"
                f" [{len(rows.query_lens)}, at least {blocks_needed.max()}] allowed"
            )
        lowest, highest = _extremes(table)
        if lowest >= 0 and highest < self.num_blocks:
            return  # what no sequence uses is in bounds too, most of the time
        is_used = np.arange(table.shape[1]) < blocks_needed[:, None]
        is_wrong = is_used & ((table < 0) | (table >= self.num_blocks))
        if is_wrong.any():
            sequence, place = np.argwhere(is_wrong)[0]
            raise InvalidRequestError(
                f"plan block_table[{sequence}, {place}]: {table[sequence, place]} given,"
                f" 0 to {self.num_blocks - 1} allowed"
            )

    def _check_sampling(self, plan: SamplingPlan, num_sampling: int) -> None:
        if self._approved and self._approved[0] is plan and len(plan.temperature) == num_sampling:
            return
        for f in fields(plan):
            ndim, expected = getattr(plan, f.name).ndim, 2 if f.name == "history_tail" else 1
            if ndim != expected:
                raise InvalidRequestError(f"plan sampling.{f.name}: {ndim} dimensions given, {expected} allowed")
        for name in _PER_SEQUENCE:
            if len(getattr(plan, name)) != num_sampling:
                raise InvalidRequestError(
                    f"plan sampling.{name}: {len(getattr(plan, name))} sequences given, {num_sampling} sample"
                )
        for offsets_name, flat_names in _CSRS:
            for flat_name in flat_names:
                _expect_csr(plan, offsets_name, num_sampling, flat_name, len(getattr(plan, flat_name)))
        num_words = max(len(plan.bad_word_token_offsets) - 1, 0)
        _expect_csr(plan, "bad_word_offsets", num_sampling, "bad_word_token_offsets", num_words)
        _expect_csr(plan, "bad_word_token_offsets", num_words, "bad_word_tokens", len(plan.bad_word_tokens))
        for name in _TOKEN_IDS:
            _expect_within(f"sampling.{name}", getattr(plan, name), 0, self.vocab_size - 1)
        self._approved[:] = [plan]


def _expect_shape(name: str, array: npt.NDArray[Any], shape: tuple[int, ...]) -> None:
    if array.shape != shape:
        raise InvalidRequestError(f"plan {name}: shape {list(array.shape)} given, {list(shape)} allowed")


def _expect_within(
    name: str,
    array: IntegerArray,
    low: int | IntegerArray,
    high: int | IntegerArray,
    meaning: str = "",
) -> None:
    if not array.size:
        return
    if array.size <= FEW:
        if _are_within(array, low, high):
            return  # Python is faster than numpy for the few numbers of a small batch
    elif isinstance(low, int) and isinstance(high, int) and array.min() >= low and array.max() <= high:
        return  # two passes over a small array cost less than three that make arrays
    is_wrong = (array < low) | (array > high)
    if not np.count_nonzero(is_wrong):
        return
    place = int(np.argmax(is_wrong))
    least, most = (int(np.broadcast_to(bound, array.shape)[place]) for bound in (low, high))
    meaning = f" ({meaning})" if meaning else ""
    raise InvalidRequestError(f"plan {name}[{place}]: {array[place]} given, {least} to {most}{meaning} allowed")


def _are_within(array: IntegerArray, low: int | IntegerArray, high: int | IntegerArray) -> bool:
    """Tell whether all numbers of an array of one dimension are within bounds, which are single or as many."""
    values: list[int] = array.tolist()
    lows = [low] * len(values) if isinstance(low, int) else low.tolist()
    highs = [high] * len(values) if isinstance(high, int) else high.tolist()
    bounds = zip(lows, values, highs, strict=True)
    return all(lowest <= value <= highest for lowest, value, highest in bounds)


def _extremes(array: IntegerArray) -> tuple[int, int]:
    """Return those of an array that is not empty. Python is faster than numpy for the few numbers of a small batch."""
    if array.size <= FEW:
        values = array.ravel().tolist()
        return min(values), max(values)
    return int(array.min()), int(array.max())


def _expect_csr(plan: SamplingPlan, offsets_name: str, num_owners: int, flat_name: str, num_entries: int) -> None:
    """Offsets rise from 0 to the length of the flat array."""
    offsets = getattr(plan, offsets_name)
    if len(offsets) == num_owners + 1 and not num_entries and not np.count_nonzero(offsets):
        return  # what most steps have: nobody owns an entry
    fits = len(offsets) == num_owners + 1 and offsets[0] == 0 and offsets[-1] == num_entries
    if not fits or np.any(np.diff(offsets) < 0):
        raise InvalidRequestError(
            f"plan sampling.{offsets_name}: {offsets[:8].tolist()} given, {num_owners + 1} offsets"
            f" that rise from 0 to {num_entries}, the entries of {flat_name}, allowed"
        )
