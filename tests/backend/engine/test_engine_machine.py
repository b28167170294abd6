"""Any interleaving of requests, cancellations, restarts and failures, on pools too small for comfort.

After every step: no block is lost or shared, every running sequence had a row, and every KV slot below a sequence's
valid lengths was written by that sequence's own prefix. At the end: every request ended once, with the tokens of plain
decoding (a cancelled one with their beginning).
"""

import random
from collections.abc import Callable

import hypothesis.strategies as st
import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kimi_backend.engine.commit import StepOutput
from kimi_backend.scheduler.scheduler import StepBatch
from kimi_backend.scheduler.sequence import Finish
from kimi_backend.scheduler.settings import SchedulerSettings
from kimi_backend.types.proposer import Proposer
from kimi_backend.types.request import FinishReason
from support.engine_runs import EngineHarness, Outcome
from support.lookup_checks import checks_looked_up_rows
from support.plain_decoding import decode_plainly
from support.random_policy import RandomPolicy
from support.random_requests import random_requests
from support.scripted_logits import LogitScript, prefix_hash
from support.scripted_models import ScriptedDraft, ScriptedTarget, describe

VOCAB = 24
EOS = frozenset({3})
MAX_LEN = 48
SCRIPT = LogitScript(VOCAB)
MOST_STEPS = 2000


class EngineMachine(RuleBasedStateMachine):
    @initialize(
        seed=st.integers(0, 2**32),
        block_size=st.sampled_from([1, 2, 4]),
        spare=st.integers(0, 40),
        draft_spare=st.integers(0, 40),
        max_num_seqs=st.integers(1, 8),
        agreement=st.sampled_from([0.0, 0.7, 1.0]),
        rows=st.sampled_from([8, 16, 64]),
        prefix_cache=st.booleans(),
        async_scheduling=st.booleans(),
        is_restless=st.booleans(),
        proposer=st.sampled_from(Proposer),
    )
    def create(
        self,
        seed: int,
        block_size: int,
        spare: int,
        draft_spare: int,
        max_num_seqs: int,
        agreement: float,
        rows: int,
        prefix_cache: bool,
        async_scheduling: bool,
        is_restless: bool,
        proposer: Proposer,
    ) -> None:
        smallest = MAX_LEN // block_size
        self.rng = random.Random(seed)
        sizes = {"block_size": block_size, "max_model_len": MAX_LEN}
        self.target = ScriptedTarget(describe("target", SCRIPT, num_blocks=smallest + spare, **sizes), SCRIPT)
        self.draft = ScriptedDraft(
            describe("draft", SCRIPT, num_blocks=smallest + draft_spare, **sizes), SCRIPT, agreement
        )
        self.harness = EngineHarness(
            self.target,
            self.draft,
            SchedulerSettings(
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=rows,
                enable_prefix_cache=prefix_cache,
                async_scheduling=async_scheduling,
                proposer=proposer,
                lookup_min_match=1,
                lookup_memory_bytes=self.rng.choice((2_000, 1 << 20)),
            ),
            EOS,
        )
        self.scheduler = self.harness.core.scheduler
        if is_restless:
            self.scheduler.policy = RandomPolicy(seed)
        self.target.launch = checks_looked_up_rows(self.harness, self.target.launch)  # type: ignore[method-assign]
        self.scheduler.schedule = self.everyone_has_a_row(self.scheduler.schedule)  # type: ignore[method-assign]
        self.requests = random_requests(self.rng, 60, VOCAB, longest_prompt=16, longest_output=24)
        self.cancelled: set[int] = set()

    def everyone_has_a_row(self, schedule: Callable[[], StepBatch]) -> Callable[[], StepBatch]:
        def checked() -> StepBatch:
            batch = schedule()
            assert {s.uid for s in batch.sequences} == {s.uid for s in self.scheduler.running}
            assert all(batch.num_rows)
            assert batch.num_tokens <= self.scheduler.settings.max_num_batched_tokens
            assert len(batch.sequences) <= self.scheduler.settings.max_num_seqs
            return batch

        return checked

    @precondition(lambda self: self.requests)
    @rule(count=st.integers(1, 4))
    def submit(self, count: int) -> None:
        for _ in range(min(count, len(self.requests))):
            self.harness.add(self.requests.pop())

    @rule(count=st.integers(1, 6))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.harness.step()
            self.harness.clock.now += 0.1

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        outcome = data.draw(st.sampled_from(self.live))
        finish = Finish(FinishReason.CANCELLED)
        assert self.harness.core.end(outcome.sequence, finish)
        assert not self.harness.core.end(outcome.sequence, finish)
        self.harness._emit([StepOutput(outcome.sequence, 0.0, finish=finish)])
        self.cancelled.add(outcome.sequence.uid)

    @rule()
    def restart_target(self) -> None:
        self.target.restart()

    @rule()
    def restart_draft(self) -> None:
        self.draft.restart()

    @rule()
    def draft_goes_or_comes_back(self) -> None:
        self.draft.unavailable = not self.draft.unavailable

    @rule()
    def one_target_step_fails(self) -> None:
        self.target.fail_at_steps = {self.target.num_steps + 1}

    @property
    def live(self) -> list[Outcome]:
        return [outcome for outcome in self.harness.outcomes if not outcome.finishes]

    @invariant()
    def no_block_is_lost_or_shared(self) -> None:
        if not hasattr(self, "harness"):
            return
        kv = self.harness.core.kv
        kv.check_invariants()
        for pool, name in ((kv.target_pool, "target_ids"), (kv.draft_pool, "draft_ids")):
            if pool is not None:
                held = [b for s in self.scheduler.running if s.blocks for b in getattr(s.blocks, name)]
                assert pool.num_held == len(set(held))
                assert all(held.count(block) == pool.ref_count(block) for block in set(held))

    @invariant()
    def kv_is_valid_wherever_lengths_say_so(self) -> None:
        if not hasattr(self, "harness"):
            return
        unread = self.harness.core._unread
        still_there = [] if unread is None else unread.still_there()
        unread_rows = {sequence.uid: unread.num_rows[index] for index, sequence in still_there}
        for sequence in self.scheduler.running:
            tokens = sequence.token_ids.tolist()
            table = self.scheduler.table
            for runner, blocks, length, num_tokens in (
                (self.target, table.target_blocks, sequence.target_len, sequence.target_len),
                (self.draft, table.draft_blocks, sequence.draft_len - sequence.draft_start, sequence.draft_len + 1),
            ):
                if length and runner._is_known:
                    found = runner.store.read_prefixes(blocks[[sequence.row]], np.array([length]))
                    assert int(found[0]) == prefix_hash(tokens[:num_tokens])
            lag = unread_rows.get(sequence.uid, 0)
            assert sequence.draft_len == (sequence.target_len - lag if sequence.uses_draft else 0)

    def teardown(self) -> None:
        if not hasattr(self, "harness"):
            return
        self.harness.run(MOST_STEPS)
        outcomes = self.harness.outcomes
        expected = decode_plainly(SCRIPT, [o.request for o in outcomes], eos_token_ids=EOS, max_model_len=MAX_LEN)
        for outcome, tokens in zip(outcomes, expected, strict=True):
            assert len(outcome.finishes) == 1
            # Three failing steps in a row, which the rules can bring about, end the requests in them.
            is_given_up = outcome.finishes[0].reason is FinishReason.ERROR
            if outcome.sequence.uid in self.cancelled or is_given_up:
                assert outcome.token_ids == tokens[: len(outcome.token_ids)]
                assert not is_given_up or "in a row failed" in (outcome.finishes[0].error or "")
            else:
                assert outcome.token_ids == tokens
                assert outcome.finishes[0].reason in (FinishReason.STOP, FinishReason.LENGTH)
        assert self.harness.core.kv.target_pool.num_held == 0
        held = sum(o.sequence.lookup.held_bytes for o in outcomes if o.sequence.lookup is not None)
        assert self.harness.lookup_memory.num_bytes == held


TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = settings(
    max_examples=40, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
)
