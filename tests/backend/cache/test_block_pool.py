import hypothesis.strategies as st
import pytest
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from kimi_backend.cache.block_pool import BlockPool
from kimi_backend.errors import CapacityError


def test_allocates_all_or_nothing() -> None:
    pool = BlockPool(4)
    held = pool.allocate(3)
    with pytest.raises(CapacityError, match="asked for 2 blocks, 1 of 4 available"):
        pool.allocate(2)
    assert pool.num_available == 1
    pool.release(held)
    assert sorted(pool.allocate(4)) == [0, 1, 2, 3]


def test_refuses_an_empty_pool() -> None:
    with pytest.raises(CapacityError, match="num_blocks is 0"):
        BlockPool(0)


def test_a_shared_block_is_free_after_its_last_holder() -> None:
    pool = BlockPool(1)
    (block_id,) = pool.allocate(1)
    pool.share([block_id])
    pool.release([block_id])
    assert pool.num_available == 0
    pool.release([block_id])
    assert pool.num_available == 1


def test_releasing_too_often_is_an_error() -> None:
    pool = BlockPool(1)
    block_ids = pool.allocate(1)
    pool.release(block_ids)
    with pytest.raises(AssertionError, match="released more often"):
        pool.release(block_ids)


def test_evicts_the_block_released_longest_ago_and_tails_first() -> None:
    pool = BlockPool(4)
    evicted: list[int] = []
    pool.on_evict = evicted.append
    first, second = pool.allocate(2), pool.allocate(2)
    for block_id in [*first, *second]:
        pool.set_cached(block_id)
    pool.release(second)
    pool.release(first)
    pool.allocate(3)
    assert evicted == [second[1], second[0], first[1]]


def test_a_cached_block_can_be_taken_up_again() -> None:
    pool = BlockPool(1)
    block_ids = pool.allocate(1)
    pool.set_cached(block_ids[0])
    pool.release(block_ids)
    pool.share(block_ids)
    assert pool.num_available == 0
    pool.check_invariants()


def test_block_ids_beyond_sixteen_bits() -> None:
    pool = BlockPool(70_000)
    assert sorted(pool.allocate(70_000)) == list(range(70_000))


class BlockPoolMachine(RuleBasedStateMachine):
    held = Bundle("held")

    @initialize(num_blocks=st.integers(1, 16))
    def create(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks)
        self.cached: set[int] = set()
        self.pool.on_evict = self.cached.remove
        self.holders: dict[int, int] = {}

    @rule(target=held, count=st.integers(0, 20))
    def allocate(self, count: int) -> list[int]:
        before = self.pool.num_available
        if count > before:
            with pytest.raises(CapacityError):
                self.pool.allocate(count)
            assert self.pool.num_available == before
            return []
        block_ids = self.pool.allocate(count)
        assert len(set(block_ids)) == count
        for block_id in block_ids:
            assert block_id not in self.holders
            assert block_id not in self.cached
            self.holders[block_id] = 1
        return block_ids

    @rule(block_ids=held, data=st.data())
    def cache(self, block_ids: list[int], data: st.DataObject) -> None:
        for block_id in block_ids:
            if data.draw(st.booleans()):
                self.pool.set_cached(block_id)
                self.cached.add(block_id)

    @rule(target=held, data=st.data())
    def share_cached(self, data: st.DataObject) -> list[int]:
        chosen = [block_id for block_id in sorted(self.cached) if data.draw(st.booleans())]
        self.pool.share(chosen)
        for block_id in chosen:
            self.holders[block_id] = self.holders.get(block_id, 0) + 1
        return chosen

    @rule(data=st.data())
    def forget_cached(self, data: st.DataObject) -> None:
        for block_id in sorted(self.cached):
            if data.draw(st.booleans()):
                self.pool.clear_cached(block_id)
                self.cached.remove(block_id)

    @rule(block_ids=consumes(held))
    def release(self, block_ids: list[int]) -> None:
        self.pool.release(block_ids)
        for block_id in block_ids:
            self.holders[block_id] -= 1
            if not self.holders[block_id]:
                del self.holders[block_id]

    @invariant()
    def no_block_is_lost_or_shared(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.pool.check_invariants()
        assert self.pool.num_held == len(self.holders)
        assert {b for b in range(self.pool.num_blocks) if self.pool.is_cached(b)} == self.cached


TestBlockPoolMachine = BlockPoolMachine.TestCase
