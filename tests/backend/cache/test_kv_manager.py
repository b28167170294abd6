import numpy as np
import pytest

from kimi_backend.cache.kv_manager import KvManager, SequenceBlocks
from kimi_backend.types.plan import Int32Array

SIZE = 4


def tokens(count: int, start: int = 0) -> Int32Array:
    return np.arange(start, start + count, dtype=np.int32)


def manager(num_blocks: int = 32, num_draft_blocks: int | None = 32) -> KvManager:
    return KvManager(block_size=SIZE, num_target_blocks=num_blocks, num_draft_blocks=num_draft_blocks)


def start(
    kv: KvManager, token_ids: Int32Array, *, uses_draft: bool = True, cache_salt: str | None = None
) -> SequenceBlocks:
    blocks = kv.start(
        kv.new_chain(cache_salt),
        token_ids,
        num_target_slots=len(token_ids),
        num_draft_slots=len(token_ids) if uses_draft else 0,
    )
    assert blocks is not None
    kv.check_invariants()
    return blocks


def finish(kv: KvManager, blocks: SequenceBlocks, token_ids: Int32Array, valid: int, draft_valid: int) -> None:
    kv.publish(blocks, token_ids, valid, draft_valid)
    kv.release(blocks)
    kv.check_invariants()


def test_both_pools_are_taken_or_neither() -> None:
    kv = manager(num_blocks=8, num_draft_blocks=2)
    refused = kv.start(kv.new_chain(None), tokens(12), num_target_slots=12, num_draft_slots=12)
    assert refused is None
    assert kv.draft_pool is not None
    assert (kv.target_pool.num_held, kv.draft_pool.num_held) == (0, 0)
    blocks = start(kv, tokens(8))
    assert not kv.grow(blocks, 12, 12)
    assert (len(blocks.target_ids), len(blocks.draft_ids)) == (2, 2)


def test_a_hit_leaves_one_token_to_compute() -> None:
    kv = manager()
    finish(kv, start(kv, tokens(9)), tokens(9), 8, 8)
    assert start(kv, tokens(8)).num_cached_tokens == 4
    assert start(kv, tokens(9)).num_cached_tokens == 8


def test_a_hit_is_the_smaller_of_both_pools_and_what_the_draft_lacks_is_computed() -> None:
    kv = manager()
    finish(kv, start(kv, tokens(13)), tokens(13), 12, 8)
    assert start(kv, tokens(13), uses_draft=False).num_cached_tokens == 12
    blocks = start(kv, tokens(13))
    assert (blocks.num_cached_tokens, blocks.draft_start, len(blocks.draft_ids)) == (8, 0, 4)
    finish(kv, blocks, tokens(13), 12, 12)
    assert start(kv, tokens(13)).num_cached_tokens == 12


@pytest.mark.parametrize("draft_valid", [0, 4])
def test_a_draft_that_lacks_more_than_half_begins_behind_the_targets_hit(draft_valid: int) -> None:
    kv = manager()
    finish(kv, start(kv, tokens(13), uses_draft=draft_valid > 0), tokens(13), 12, draft_valid)
    blocks = start(kv, tokens(13))
    assert (blocks.num_cached_tokens, blocks.draft_start, len(blocks.draft_ids)) == (12, 12, 1)
    finish(kv, blocks, tokens(13), 12, 0)
    assert start(kv, tokens(13)).draft_start == 12, "its KV depends on where it began, and is shared with nobody"


def test_a_draft_block_needs_the_same_successor() -> None:
    kv = manager()
    finish(kv, start(kv, tokens(9)), tokens(9), 8, 8)
    other = tokens(9)
    other[8] = 99
    assert start(kv, other).num_cached_tokens == 4
    assert start(kv, other, uses_draft=False).num_cached_tokens == 8


def test_a_draft_block_without_a_successor_is_not_published() -> None:
    kv = manager()
    finish(kv, start(kv, tokens(8)), tokens(8), 8, 8)
    assert start(kv, tokens(9)).num_cached_tokens == 4


def test_only_valid_lengths_are_published() -> None:
    kv = manager()
    finish(kv, start(kv, tokens(12)), tokens(12), 7, 7)
    assert start(kv, tokens(12)).num_cached_tokens == 4


def test_salts_do_not_share() -> None:
    kv = manager()
    finish(kv, start(kv, tokens(9), cache_salt="a"), tokens(9), 8, 8)
    assert start(kv, tokens(9)).num_cached_tokens == 0
    assert start(kv, tokens(9), cache_salt="b").num_cached_tokens == 0
    assert start(kv, tokens(9), cache_salt="a").num_cached_tokens == 8


def test_evicting_a_target_block_drops_its_draft_blocks() -> None:
    kv = manager(num_blocks=2, num_draft_blocks=8)
    finish(kv, start(kv, tokens(5)), tokens(5), 4, 4)
    start(kv, tokens(8, start=50), uses_draft=False)
    kv.check_invariants()
    assert (kv.prefix_cache.num_target_blocks, kv.prefix_cache.num_draft_blocks) == (0, 0)


def test_evicting_the_last_draft_block_drops_the_target_block() -> None:
    kv = manager(num_blocks=8, num_draft_blocks=2)
    finish(kv, start(kv, tokens(5)), tokens(5), 4, 4)
    start(kv, tokens(8, start=50))
    kv.check_invariants()
    assert (kv.prefix_cache.num_target_blocks, kv.prefix_cache.num_draft_blocks) == (0, 0)


def test_resetting_the_draft_keeps_the_target_cache() -> None:
    kv = manager()
    finish(kv, start(kv, tokens(9)), tokens(9), 8, 8)
    kv.reset_draft(16)
    kv.check_invariants()
    assert start(kv, tokens(9)).draft_start == 8
    assert start(kv, tokens(9), uses_draft=False).num_cached_tokens == 8


def test_resetting_the_target_empties_both_caches() -> None:
    kv = manager()
    finish(kv, start(kv, tokens(9)), tokens(9), 8, 8)
    kv.reset_target(32)
    kv.check_invariants()
    assert start(kv, tokens(9), uses_draft=False).num_cached_tokens == 0


def test_dropping_the_draft_gives_its_blocks_back() -> None:
    kv = manager()
    blocks = start(kv, tokens(9))
    kv.drop_draft(blocks)
    kv.check_invariants()
    assert kv.draft_pool is not None
    assert kv.draft_pool.num_held == 0
    assert kv.grow(blocks, 16, 0)
    assert not blocks.draft_ids


def test_withdrawn_blocks_are_found_no_more() -> None:
    kv = manager()
    bad = start(kv, tokens(9))
    kv.publish(bad, tokens(9), 8, 8)
    sharer = start(kv, tokens(9))
    assert sharer.num_cached_tokens == 8
    kv.withdraw(bad)
    kv.check_invariants()
    assert start(kv, tokens(9)).num_cached_tokens == 0
    for blocks in (bad, sharer):
        kv.release(blocks)
    kv.check_invariants()


def test_draft_blocks_can_be_withdrawn_alone() -> None:
    kv = manager()
    bad = start(kv, tokens(9))
    kv.publish(bad, tokens(9), 8, 8)
    kv.withdraw_draft(bad)
    kv.check_invariants()
    assert start(kv, tokens(9)).draft_start == 8, "none of its KV is found"
    assert start(kv, tokens(9), uses_draft=False).num_cached_tokens == 8


@pytest.mark.parametrize("enabled", [True, False])
def test_the_prefix_cache_can_be_off(enabled: bool) -> None:
    kv = KvManager(block_size=SIZE, num_target_blocks=8, num_draft_blocks=8, enable_prefix_cache=enabled)
    finish(kv, start(kv, tokens(9)), tokens(9), 8, 8)
    assert start(kv, tokens(9)).num_cached_tokens == (8 if enabled else 0)
