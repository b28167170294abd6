"""Any interleaving of sequences over small pools: what a block holds is what its finder believes it holds."""

from dataclasses import dataclass
from typing import ClassVar

import hypothesis.strategies as st
import numpy as np
from hypothesis import settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kimi_backend.cache.kv_manager import KvManager, SequenceBlocks

SIZE = 2
Content = tuple[int, ...]


@dataclass
class Running:
    tokens: list[int]
    salt: str | None
    blocks: SequenceBlocks
    uses_draft: bool
    target_len: int
    draft_len: int


class KvManagerMachine(RuleBasedStateMachine):
    """Tokens come from an alphabet of two, so that prefixes collide often."""

    num_draft_hits: ClassVar[int] = 0
    """Blocks that were found in both pools, over all examples."""

    @initialize(num_target=st.integers(2, 30), num_draft=st.integers(2, 30))
    def create(self, num_target: int, num_draft: int) -> None:
        self.kv = KvManager(block_size=SIZE, num_target_blocks=num_target, num_draft_blocks=num_draft)
        self.running: list[Running] = []
        self.target_content: dict[int, tuple[str | None, Content]] = {}
        self.draft_content: dict[int, tuple[str | None, Content]] = {}

    @rule(
        token_ids=st.lists(st.integers(0, 1), min_size=1, max_size=9),
        salt=st.sampled_from([None, "a"]),
        uses_draft=st.booleans(),
    )
    def start(self, token_ids: list[int], salt: str | None, uses_draft: bool) -> None:
        blocks = self.kv.start(
            self.kv.new_chain(salt),
            np.array(token_ids, np.int32),
            num_target_slots=len(token_ids),
            num_draft_slots=len(token_ids) if uses_draft else 0,
        )
        if blocks is None:
            return
        self.check_hit(blocks, token_ids, salt, uses_draft)

    @precondition(lambda self: bool(self.running))
    @rule(data=st.data(), more=st.lists(st.integers(0, 1), min_size=3, max_size=5), uses_draft=st.booleans())
    def continue_another(self, data: st.DataObject, more: list[int], uses_draft: bool) -> None:
        """A newcomer that begins with all that another one has, as the next turn of a conversation does."""
        other = data.draw(st.sampled_from(self.running))
        self.advance_one(other, more, 0)
        self.start([*other.tokens, *more], other.salt, uses_draft)

    def check_hit(self, blocks: SequenceBlocks, token_ids: list[int], salt: str | None, uses_draft: bool) -> None:
        hit = blocks.num_cached_tokens
        assert hit <= len(token_ids) - 1
        assert blocks.draft_start in ((0, hit) if uses_draft else (0,))
        uses_draft = uses_draft and not blocks.draft_start  # nothing of what begins in mid text is ever published
        running = Running(list(token_ids), salt, blocks, uses_draft, hit, hit if uses_draft else 0)
        for block in range(hit // SIZE):
            end = (block + 1) * SIZE
            assert self.target_content[blocks.target_ids[block]] == (salt, tuple(token_ids[:end]))
            if uses_draft:
                type(self).num_draft_hits += 1
                assert self.draft_content[blocks.draft_ids[block]] == (salt, tuple(token_ids[: end + 1]))
        self.running.append(running)

    @precondition(lambda self: bool(self.running))
    @rule(data=st.data(), more=st.lists(st.integers(0, 1), max_size=4), rejected=st.integers(0, 3))
    def advance(self, data: st.DataObject, more: list[int], rejected: int) -> None:
        """Write KV for all tokens and for some rejected ones behind them, then publish what is valid."""
        self.advance_one(data.draw(st.sampled_from(self.running)), [*more, data.draw(st.integers(0, 1))], rejected)

    def advance_one(self, running: Running, more: list[int], rejected: int) -> None:
        slots = len(running.tokens) + rejected
        if not self.kv.grow(running.blocks, slots, slots if running.uses_draft else 0):
            return
        self.write(running, len(running.tokens), rejected)
        running.tokens += more
        self.kv.publish(running.blocks, np.array(running.tokens, np.int32), running.target_len, running.draft_len)

    def write(self, running: Running, valid: int, rejected: int) -> None:
        blocks, garbage = running.blocks, [9] * rejected
        known = running.tokens + garbage
        for start, ids, pool, content, shift in (
            (running.target_len, blocks.target_ids, self.kv.target_pool, self.target_content, 0),
            (running.draft_len, blocks.draft_ids, self.kv.draft_pool, self.draft_content, 1),
        ):
            for block in sorted({slot // SIZE for slot in range(start, valid + rejected)}):
                if block < len(ids):
                    assert pool is not None
                    assert pool.ref_count(ids[block]) == 1, "wrote into a shared block"
                    assert not pool.is_cached(ids[block]), "wrote into a published block"
                    content[ids[block]] = (running.salt, tuple(known[: (block + 1) * SIZE + shift]))
        running.target_len = valid
        running.draft_len = valid - 1 if running.uses_draft else 0

    @precondition(lambda self: bool(self.running))
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        running = data.draw(st.sampled_from(self.running))
        self.running.remove(running)
        self.kv.release(running.blocks)

    @precondition(lambda self: bool(self.running))
    @rule(data=st.data())
    def drop_draft(self, data: st.DataObject) -> None:
        running = data.draw(st.sampled_from(self.running))
        self.kv.drop_draft(running.blocks)
        running.draft_len, running.uses_draft = 0, False

    @precondition(lambda self: len(self.running) > 4)
    @rule(num_blocks=st.integers(2, 30))
    def lose_the_draft(self, num_blocks: int) -> None:
        for running in self.running:
            self.kv.drop_draft(running.blocks)
            running.draft_len, running.uses_draft = 0, False
        self.kv.reset_draft(num_blocks)
        self.draft_content.clear()

    @invariant()
    def nothing_is_lost_or_owned_twice(self) -> None:
        if not hasattr(self, "kv"):
            return
        self.kv.check_invariants()
        for pool, name in ((self.kv.target_pool, "target_ids"), (self.kv.draft_pool, "draft_ids")):
            assert pool is not None
            holders: dict[int, int] = {}
            for running in self.running:
                for block_id in getattr(running.blocks, name):
                    holders[block_id] = holders.get(block_id, 0) + 1
            assert holders == {b: pool.ref_count(b) for b in range(pool.num_blocks) if pool.ref_count(b)}


def test_blocks_of_both_pools() -> None:
    # A draft that begins in mid text publishes nothing, so that hits of both pools are rare: many examples, always the
    # same ones.
    run_state_machine_as_test(
        KvManagerMachine,
        settings=settings(max_examples=200, stateful_step_count=40, deadline=None, derandomize=True),
    )
    assert KvManagerMachine.num_draft_hits > 10
