from kimi_backend.cache.block_pool import BlockPool
from kimi_backend.cache.prefix_cache import PrefixCache


def make_cache() -> tuple[PrefixCache, BlockPool, BlockPool]:
    target_pool, draft_pool = BlockPool(4, "target"), BlockPool(4, "draft")
    return PrefixCache(target_pool, draft_pool), target_pool, draft_pool


def test_a_draft_block_without_its_target_block_is_not_kept() -> None:
    cache, _, draft_pool = make_cache()
    (block_id,) = draft_pool.allocate(1)
    cache.publish_draft((b"key", 5), block_id)
    assert cache.find_draft([(b"key", 5)]) == []
    cache.check_invariants()


def test_the_first_of_equal_blocks_stays() -> None:
    cache, target_pool, draft_pool = make_cache()
    first, second = target_pool.allocate(2)
    for block_id in (first, second):
        cache.publish_target(b"key", block_id)
    assert cache.find_target([b"key"]) == [first]
    first_draft, second_draft = draft_pool.allocate(2)
    for block_id in (first_draft, second_draft):
        cache.publish_draft((b"key", 5), block_id)
    assert cache.find_draft([(b"key", 5)]) == [first_draft]
    cache.check_invariants()


def test_a_target_block_keeps_the_draft_blocks_of_several_successors() -> None:
    cache, target_pool, draft_pool = make_cache()
    (target_block,) = target_pool.allocate(1)
    cache.publish_target(b"key", target_block)
    drafts = draft_pool.allocate(2)
    for successor, block_id in enumerate(drafts):
        cache.publish_draft((b"key", successor), block_id)
    target_pool.release([target_block])
    draft_pool.release([drafts[0]])
    draft_pool.allocate(3)  # evicts the idle draft block; the other one still leans on the target block
    assert cache.find_draft([(b"key", 0)]) == []
    assert cache.find_draft([(b"key", 1)]) == [drafts[1]]
    assert cache.find_target([b"key"]) == [target_block]
    cache.check_invariants()


def test_the_longest_published_prefix_is_found() -> None:
    cache, target_pool, _ = make_cache()
    blocks = target_pool.allocate(3)
    for key, block_id in zip((b"a", b"b", b"d"), blocks, strict=True):
        cache.publish_target(key, block_id)
    assert cache.find_target([b"a", b"b", b"c", b"d"]) == blocks[:2]
