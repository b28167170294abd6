"""The cached block of each prefix, for the target's pool and the draft's."""

from collections.abc import Sequence

from kimi_backend.cache.block_pool import BlockPool
from kimi_backend.cache.hash_chain import BlockKey, DraftBlockKey


class PrefixCache:
    """Content addresses of published blocks of both pools.

    A draft block is of no use without the target block of its position, so the target's eviction drops the draft
    blocks that lean on it, and evicting the last of those drops an idle target block.
    """

    def __init__(self, target_pool: BlockPool, draft_pool: BlockPool | None) -> None:
        self._target_pool = target_pool
        self._draft_pool = draft_pool
        self._target_blocks: dict[BlockKey, int] = {}
        self._target_keys: dict[int, BlockKey] = {}
        self._draft_blocks: dict[DraftBlockKey, int] = {}
        self._draft_keys: dict[int, DraftBlockKey] = {}
        self._successors: dict[BlockKey, set[int]] = {}
        target_pool.on_evict = self._on_target_evicted
        if draft_pool is not None:
            draft_pool.on_evict = self._on_draft_evicted

    @property
    def num_target_blocks(self) -> int:
        return len(self._target_blocks)

    @property
    def num_draft_blocks(self) -> int:
        return len(self._draft_blocks)

    def find_target(self, keys: Sequence[BlockKey]) -> list[int]:
        """Blocks of the longest published prefix."""
        block_ids = []
        for key in keys:
            block_id = self._target_blocks.get(key)
            if block_id is None:
                break
            block_ids.append(block_id)
        return block_ids

    def find_draft(self, keys: Sequence[DraftBlockKey]) -> list[int]:
        """Draft blocks of the longest published prefix."""
        block_ids = []
        for key in keys:
            block_id = self._draft_blocks.get(key)
            if block_id is None:
                break
            block_ids.append(block_id)
        return block_ids

    def publish_target(self, key: BlockKey, block_id: int) -> None:
        """Offer a held block whose KV is valid to its end. An equal block that is there already stays."""
        if key not in self._target_blocks:
            self._target_blocks[key] = block_id
            self._target_keys[block_id] = key
            self._target_pool.set_cached(block_id)

    def publish_draft(self, key: DraftBlockKey, block_id: int) -> None:
        """Offer a held draft block likewise, if the target block of its position is published."""
        assert self._draft_pool is not None
        target_key, successor = key
        if target_key in self._target_blocks and key not in self._draft_blocks:
            self._draft_blocks[key] = block_id
            self._draft_keys[block_id] = key
            self._successors.setdefault(target_key, set()).add(successor)
            self._draft_pool.set_cached(block_id)

    def withdraw(self, target_ids: Sequence[int], draft_ids: Sequence[int]) -> None:
        """Forget held blocks whose content turned out to be bad; their holders keep them."""
        for block_id in draft_ids:
            if block_id in self._draft_keys:
                assert self._draft_pool is not None
                self._draft_pool.clear_cached(block_id)
                self._on_draft_evicted(block_id)
        for block_id in target_ids:
            if block_id in self._target_keys:
                self._target_pool.clear_cached(block_id)
                self._on_target_evicted(block_id)

    def clear_draft(self, draft_pool: BlockPool | None) -> None:
        """Forget every draft block and use another pool from now on."""
        self._draft_blocks.clear()
        self._draft_keys.clear()
        self._successors.clear()
        self._draft_pool = draft_pool
        if draft_pool is not None:
            draft_pool.on_evict = self._on_draft_evicted

    def check_invariants(self) -> None:
        """Every entry names a cached block and every cached block has its entry.

        Raises:
            AssertionError: they disagree.
        """
        assert self._target_keys == {block_id: key for key, block_id in self._target_blocks.items()}
        assert self._draft_keys == {block_id: key for key, block_id in self._draft_blocks.items()}
        assert self._target_pool.num_cached == len(self._target_keys)
        assert all(self._target_pool.is_cached(block_id) for block_id in self._target_keys)
        assert {key for key, successors in self._successors.items() if successors} <= set(self._target_blocks)
        pairs = {(key, successor) for key, successors in self._successors.items() for successor in successors}
        assert pairs == set(self._draft_blocks)
        if self._draft_pool is not None:
            assert self._draft_pool.num_cached == len(self._draft_keys)
            assert all(self._draft_pool.is_cached(block_id) for block_id in self._draft_keys)

    def _on_target_evicted(self, block_id: int) -> None:
        key = self._target_keys.pop(block_id)
        del self._target_blocks[key]
        for successor in self._successors.pop(key, ()):
            draft_block = self._draft_blocks.pop((key, successor))
            del self._draft_keys[draft_block]
            assert self._draft_pool is not None
            self._draft_pool.clear_cached(draft_block)

    def _on_draft_evicted(self, block_id: int) -> None:
        target_key, successor = self._draft_keys.pop(block_id)
        del self._draft_blocks[target_key, successor]
        successors = self._successors[target_key]
        successors.remove(successor)
        if successors:
            return
        del self._successors[target_key]
        target_block = self._target_blocks[target_key]
        if self._target_pool.ref_count(target_block) == 0:
            del self._target_blocks[target_key], self._target_keys[target_block]
            self._target_pool.clear_cached(target_block)
