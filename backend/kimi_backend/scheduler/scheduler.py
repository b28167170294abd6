"""The choice of who runs in the next step, with how many rows, over which blocks.

Every running sequence gets at least one row in every step: decode rows first, with as many draft tokens as the row
budget leaves, then prefill chunks, then newcomers, both with few rows where somebody decodes
(docs/decisions/0006-scheduling.md).
"""

import time
from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass

from kimi_backend.cache.hash_chain import HashChain
from kimi_backend.cache.kv_manager import KvManager
from kimi_backend.scheduler.batch_table import BatchTable
from kimi_backend.scheduler.sequence import DraftState, Sequence
from kimi_backend.scheduler.settings import SchedulerSettings
from kimi_backend.scheduler.waiting_queue import WaitingQueue
from kimi_backend.spec_decode.policy import FixedPolicy, SpeculationPolicy


@dataclass(slots=True)
class StepBatch:
    """The sequences of one step, those that decode first. Parallel lists."""

    sequences: list[Sequence]
    num_rows: list[int]
    """Rows of each: the last token and draft tokens under verification, or a chunk."""
    num_decodes: int
    """The number of the sequences, from the first, that bring their last token and draft tokens."""

    @property
    def num_tokens(self) -> int:
        return sum(self.num_rows)


class Scheduler:
    """Owns the waiting queue, the running list and their blocks. Used by the engine thread only."""

    def __init__(
        self,
        settings: SchedulerSettings,
        kv: KvManager,
        max_model_len: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.settings = settings
        self.kv = kv
        self.waiting = WaitingQueue()
        self.running: list[Sequence] = []
        """Running sequences by priority, then arrival."""
        self.table = BatchTable(settings.max_num_seqs, -(-max_model_len // kv.block_size))
        self.num_preemptions = 0
        self.policy: SpeculationPolicy = FixedPolicy()
        """Chooses who drafts how many tokens. The engine tells it of each round's end."""
        self._clock = clock
        self._admitted: Sequence | None = None
        self._refused: Sequence | None = None
        """The sequence that found no blocks the last time; nobody has given any back since."""

    @property
    def has_work(self) -> bool:
        return bool(self.running) or len(self.waiting) > 0

    def schedule(self) -> StepBatch:
        """Choose the next step's rows and take every block that it and the draft after it may write."""
        self._choose_speculation()
        self._take_blocks()
        decodes = [s for s in self.running if s.is_decoding]
        prefills = [s for s in self.running if not s.is_decoding] if len(decodes) < len(self.running) else []
        budget = self.settings.max_num_batched_tokens - len(self.running)  # beyond one row each
        num_rows = []
        for sequence in decodes:
            if sequence.num_draft_tokens > budget:
                sequence.num_draft_tokens = budget
            budget -= sequence.num_draft_tokens
            num_rows.append(1 + sequence.num_draft_tokens)
        if decodes and self.settings.max_prompt_tokens_beside_decode:
            budget = min(budget, max(self.settings.max_prompt_tokens_beside_decode - len(prefills), 0))
        for sequence in prefills:
            chunk = min(sequence.num_tokens - sequence.target_len, 1 + budget)
            budget -= chunk - 1
            num_rows.append(chunk)
        batch = StepBatch(decodes + prefills, num_rows, len(decodes))
        if budget > 0 and len(self.waiting):
            self._admit(batch, budget)
        return batch

    @property
    def is_drafting(self) -> bool:
        """True if the draft is there: sequences that start now may use it."""
        return self.kv.draft_pool is not None

    @property
    def may_admit(self) -> bool:
        """True if the next step may start somebody who waits."""
        first = self.waiting.peek()
        return first is not None and first is not self._refused and len(self.running) < self.settings.max_num_seqs

    def take_next_blocks(self, sequences: list[Sequence]) -> bool:
        """Let sequences, each of which decodes one token in the step in flight, hold what the step after it writes:
        used in place of `schedule`. False if they cannot all; what they were given stays theirs."""
        for sequence in sequences:
            blocks = sequence.blocks
            assert blocks is not None
            num_held = len(blocks.target_ids)
            if sequence.num_tokens < num_held * self.kv.block_size:
                continue
            if not self.kv.grow(blocks, sequence.num_tokens + 1, 0):
                return False
            self.table.write_blocks(sequence, num_held, len(blocks.draft_ids))
        return True

    def finish(self, sequence: Sequence) -> None:
        """Take a sequence whose `finish` is set out of wherever it is, and give its blocks and its index back."""
        sequence.lookup = None  # a slow client may keep the rest of it for long
        if sequence.row >= 0:
            self._leave(sequence)
        else:
            self.waiting.forget()

    def preempt(self, sequence: Sequence) -> None:
        """Free a running sequence's blocks; it waits again, with all its tokens as input."""
        self._leave(sequence)
        sequence.target_len = sequence.draft_len = sequence.draft_start = sequence.num_draft_tokens = 0
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        self.waiting.push(sequence)

    def drop_draft(self, sequence: Sequence, state: DraftState = DraftState.OUT) -> None:
        """Let a running sequence go on without the draft."""
        assert sequence.blocks is not None
        self._refused = None
        sequence.draft = state
        self.kv.drop_draft(sequence.blocks)
        sequence.draft_len = sequence.draft_start = sequence.num_draft_tokens = 0

    def ask_policy(self) -> list[Sequence]:
        """Tell the policy that a round begins. Returns those whose part in speculation it chooses."""
        candidates = self._candidates
        self.policy.begin_round([s.speculation for s in candidates], len(self.running), self._num_context_tokens)
        return candidates

    def prepare_choice(self) -> None:
        """Let the policy choose for those that run now, while the models work."""
        candidates = [s.speculation for s in self._candidates]
        self.policy.prepare_round(candidates, len(self.running), self._num_context_tokens)

    @property
    def _candidates(self) -> list[Sequence]:
        return [s for s in self.running if s.wants_draft] if self.is_drafting else []

    @property
    def _num_context_tokens(self) -> int:
        return sum(s.num_tokens for s in self.running)

    def _choose_speculation(self) -> None:
        """Ask the policy, and let sequences leave the draft or come to it."""
        for sequence in self.running:
            if sequence.wants_draft and self._is_beyond_the_draft(sequence):
                self._leave_draft(sequence, DraftState.NEVER)
        for sequence in self.ask_policy():
            if sequence.uses_draft and not sequence.speculation.uses_draft:
                self._leave_draft(sequence)
            elif sequence.speculation.uses_draft and not sequence.uses_draft and sequence.is_decoding:
                self.begin_draft(sequence)

    def _leave_draft(self, sequence: Sequence, state: DraftState = DraftState.OUT) -> None:
        num_in_flight = sequence.num_draft_tokens
        self.drop_draft(sequence, state)
        sequence.num_draft_tokens = num_in_flight  # paid for already

    def _is_beyond_the_draft(self, sequence: Sequence) -> bool:
        """The sequence is longer than the operator lets the draft go."""
        return 0 < self.settings.draft_max_positions <= sequence.num_tokens

    def begin_draft(self, sequence: Sequence) -> None:
        """Let a decoding sequence use the draft from its next row on, with nothing of its text in the draft's KV."""
        assert self.is_drafting and sequence.draft is DraftState.OUT
        sequence.draft = DraftState.ON
        sequence.draft_len = sequence.draft_start = sequence.target_len

    def _leave(self, sequence: Sequence) -> None:
        assert sequence.blocks is not None
        self._refused = None
        self.running.remove(sequence)
        self.table.remove(sequence)
        self.kv.release(sequence.blocks)
        sequence.blocks = None
        if sequence.uses_draft:
            sequence.draft = DraftState.OUT

    def _take_blocks(self) -> None:
        """Grow every running sequence's blocks; when they run out, preempt from the end of the running list."""
        size = self.kv.block_size
        for sequence in self.running.copy():
            if sequence.row < 0:
                continue  # preempted for one before it
            blocks = sequence.blocks
            assert blocks is not None
            target_slots, draft_slots = self._slots(sequence, sequence.uses_draft)
            num_target, num_draft = len(blocks.target_ids), len(blocks.draft_ids)
            if target_slots <= num_target * size and draft_slots <= num_draft * size:
                continue
            while not self.kv.grow(blocks, target_slots, draft_slots):
                victim = self.running[-1]
                self.preempt(victim)
                if victim is sequence:
                    break
            else:
                self.table.write_blocks(sequence, num_target, num_draft)

    def _slots(self, sequence: Sequence, uses_draft: bool) -> tuple[int, int]:
        """KV slots that this step and the draft after it may write up to, in each pool.

        With n + 1 tokens and k of them under verification: target n + k + 1; draft n + k + k' for a next proposal of
        k' tokens, at most what may still be of use after the one token that the step emits for certain.
        """
        target_slots = sequence.num_tokens + sequence.num_draft_tokens
        if not uses_draft:
            return target_slots, 0
        num_next = sequence.speculation.num_draft_tokens(sequence.num_remaining_tokens - 1)
        draft_slots = target_slots + max(num_next - 1, 0)
        return target_slots, min(draft_slots, sequence.max_num_tokens) - sequence.draft_start

    def _admit(self, batch: StepBatch, budget: int) -> None:
        """Start waiting sequences in order, while rows and blocks last.

        One that would compute what a running one is just computing waits for that, and lets others pass.
        """
        passed: list[Sequence] = []
        filling = [s for s in self.running if s.is_filling] if self.kv.enable_prefix_cache else []
        while budget > 0 and max(len(self.running), len(passed)) < self.settings.max_num_seqs:
            sequence = self.waiting.peek()
            if sequence is None:
                break
            if filling and self._will_find_more(sequence, filling):
                passed.append(self.waiting.pop())
                continue
            if not self._start(sequence):
                self._refused = sequence
                break
            self.waiting.pop()
            if self.kv.enable_prefix_cache and sequence.is_filling:
                filling.append(sequence)
            chunk = min(sequence.num_tokens - sequence.target_len, budget)
            budget -= chunk
            batch.sequences.append(sequence)
            batch.num_rows.append(chunk)
        for sequence in passed:
            self.waiting.push(sequence)

    def _will_find_more(self, sequence: Sequence, filling: list[Sequence]) -> bool:
        """Tell whether one of `filling` is about to publish the block behind those that a sequence would find now."""
        if not sequence.reads_prefix_cache:
            return False
        uses_draft, chain = sequence.wants_draft and self.is_drafting, self._chain_of(sequence)
        num_found = self.kv.num_cached_blocks(chain, sequence.token_ids, uses_draft)
        end = (num_found + 1) * self.kv.block_size
        if sequence.num_tokens <= end:
            return False
        key = chain.keys[num_found : num_found + 1]
        return any(
            self._chain_of(other).keys[num_found : num_found + 1] == key
            and other.will_publish(end, with_draft=uses_draft)
            for other in filling
        )

    def _chain_of(self, sequence: Sequence) -> HashChain:
        if sequence.chain is None:
            sequence.chain = self.kv.new_chain(sequence.request.cache_salt)
        return sequence.chain

    def _start(self, sequence: Sequence) -> bool:
        """Give blocks for all known tokens at once, leaving one for each running sequence to grow into."""
        if sequence.draft is not DraftState.NEVER:
            sequence.draft = DraftState.OUT if self.is_drafting else DraftState.AWAY
        uses_draft = sequence.wants_draft and self.is_drafting and not self._is_beyond_the_draft(sequence)
        if uses_draft and self._admitted is not sequence:  # once, though it may not find room for a while
            others = [s.speculation for s in self.running if s.wants_draft]
            num_expected = min(len(self.running) + len(self.waiting), self.settings.max_num_seqs)
            num_context_tokens = self._num_context_tokens + sequence.num_tokens
            self.policy.admit(sequence.speculation, others, num_expected, num_context_tokens)
            self._admitted = sequence
        uses_draft = uses_draft and sequence.speculation.uses_draft
        target_slots, draft_slots = self._slots(sequence, uses_draft)
        blocks = self.kv.start(
            self._chain_of(sequence),
            sequence.token_ids,
            num_target_slots=target_slots,
            num_draft_slots=draft_slots,
            num_spare_blocks=len(self.running),
            reads_cache=sequence.reads_prefix_cache,
        )
        if blocks is None:
            return False
        self._admitted = None
        sequence.blocks = blocks
        sequence.target_len = blocks.num_cached_tokens
        if uses_draft:
            sequence.draft, sequence.draft_len = DraftState.ON, blocks.num_cached_tokens
            sequence.draft_start = blocks.draft_start
        if sequence.num_cached_tokens is None:
            sequence.num_cached_tokens = blocks.num_cached_tokens
            sequence.first_scheduled_s = self._clock()
        self.table.add(sequence)
        insort(self.running, sequence, key=lambda s: s.order)
        return True
