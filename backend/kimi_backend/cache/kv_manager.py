"""Blocks of both pools for each sequence: taken together or not at all, published, shared and given back."""

from dataclasses import dataclass, field

from kimi_backend.cache.block_pool import BlockPool
from kimi_backend.cache.hash_chain import DraftBlockKey, HashChain
from kimi_backend.cache.prefix_cache import PrefixCache
from kimi_backend.types.plan import Int32Array


@dataclass(slots=True, eq=False)
class SequenceBlocks:
    """The blocks that one running sequence holds. Changed by `KvManager` only."""

    chain: HashChain
    target_ids: list[int] = field(default_factory=list)
    draft_ids: list[int] = field(default_factory=list)
    num_cached_tokens: int = 0
    """Tokens whose KV was found in the prefix cache when the blocks were taken."""
    num_published_target: int = 0
    """Leading blocks that were offered to the prefix cache or came from it."""
    num_published_draft: int = 0
    draft_start: int = 0
    """The position in the draft's first slot: it begins in mid text where the target's hit is much the longer one."""


class KvManager:
    """Both pools and their prefix cache, as the scheduler uses them."""

    def __init__(
        self, *, block_size: int, num_target_blocks: int, num_draft_blocks: int | None, enable_prefix_cache: bool = True
    ) -> None:
        """num_draft_blocks: None when there is no draft."""
        self.block_size = block_size
        self.enable_prefix_cache = enable_prefix_cache
        self.target_pool = BlockPool(num_target_blocks, "target KV")
        self.draft_pool = _draft_pool(num_draft_blocks)
        self.prefix_cache = PrefixCache(self.target_pool, self.draft_pool)

    def new_chain(self, cache_salt: str | None) -> HashChain:
        """An empty hash chain for a sequence; it stays right for as long as the sequence only grows."""
        return HashChain(self.block_size, cache_salt)

    def start(
        self,
        chain: HashChain,
        token_ids: Int32Array,
        *,
        num_target_slots: int,
        num_draft_slots: int,
        num_spare_blocks: int = 0,
        reads_cache: bool = True,
    ) -> SequenceBlocks | None:
        """Take blocks for a sequence that (re)starts, the leading ones from the prefix cache where it has them.

        A hit covers at most all tokens but the last, so that there is a row to sample from. For a sequence that uses
        the draft it is the smaller of both pools' hits; where that is less than half of the target's, it is the
        target's, and the draft begins behind it: its guesses are worse for a while, but no prompt is computed again.

        Args:
            chain: the sequence's own; extended here as far as needed.
            token_ids: [num_tokens], everything known of the sequence.
            num_target_slots, num_draft_slots: KV slots to hold from the sequence's beginning, cached ones included.
                num_draft_slots is 0 for a sequence without the draft.
            num_spare_blocks: blocks that must stay available in each pool.
            reads_cache: false computes every row, cached or not.

        Returns:
            None when there is no room; nothing has changed then.
        """
        blocks, uses_draft = SequenceBlocks(chain), num_draft_slots > 0
        if self.enable_prefix_cache and reads_cache:
            self._take_cached(blocks, token_ids, uses_draft)
        num_draft_slots = max(num_draft_slots - blocks.draft_start, 0)
        if self.grow(blocks, num_target_slots, num_draft_slots) and self._has_spare(uses_draft, num_spare_blocks):
            return blocks
        self.release(blocks)
        return None

    def grow(self, blocks: SequenceBlocks, num_target_slots: int, num_draft_slots: int) -> bool:
        """Hold at least so many slots in both pools. False, and nothing changed, when either lacks room."""
        size = self.block_size
        more_target = (num_target_slots + size - 1) // size - len(blocks.target_ids)
        more_draft = (num_draft_slots + size - 1) // size - len(blocks.draft_ids)
        if more_target <= 0 and more_draft <= 0:
            return True
        if more_target > self.target_pool.num_available:
            return False
        if more_draft > 0:
            assert self.draft_pool is not None
            if more_draft > self.draft_pool.num_available:
                return False
            blocks.draft_ids += self.draft_pool.allocate(more_draft)
        if more_target > 0:
            blocks.target_ids += self.target_pool.allocate(more_target)
        return True

    def publish(self, blocks: SequenceBlocks, token_ids: Int32Array, target_len: int, draft_len: int) -> None:
        """Offer every block that the valid lengths cover. Call it after the step that wrote them has returned.

        Args:
            token_ids: [num_tokens] the sequence; a draft block needs the token after it.
            target_len, draft_len: tokens whose KV is *valid* in each pool, never merely written; 0 without the draft.
        """
        if not self.enable_prefix_cache:
            return
        size = self.block_size
        num_target = target_len // size
        num_draft = min(draft_len, len(token_ids) - 1) // size
        blocks.chain.extend(token_ids, max(num_target, num_draft))
        keys = blocks.chain.keys
        for block in range(blocks.num_published_target, num_target):
            self.prefix_cache.publish_target(keys[block], blocks.target_ids[block])
        for block in range(blocks.num_published_draft, num_draft):
            successor = int(token_ids[(block + 1) * size])
            self.prefix_cache.publish_draft((keys[block], successor), blocks.draft_ids[block])
        blocks.num_published_target = max(blocks.num_published_target, num_target)
        blocks.num_published_draft = max(blocks.num_published_draft, num_draft)

    def withdraw(self, blocks: SequenceBlocks) -> None:
        """Let nobody find this sequence's blocks any more: what it computed cannot be trusted."""
        self.prefix_cache.withdraw(blocks.target_ids, blocks.draft_ids)

    def withdraw_draft(self, blocks: SequenceBlocks) -> None:
        """Withdraw its draft blocks alone."""
        self.prefix_cache.withdraw((), blocks.draft_ids)

    def drop_draft(self, blocks: SequenceBlocks) -> None:
        """Give the draft blocks back and hold none from now on."""
        if blocks.draft_ids:
            assert self.draft_pool is not None
            self.draft_pool.release(blocks.draft_ids)
            blocks.draft_ids.clear()

    def release(self, blocks: SequenceBlocks) -> None:
        """Give everything back; published blocks stay findable until their memory is needed."""
        self.target_pool.release(blocks.target_ids)
        blocks.target_ids.clear()
        self.drop_draft(blocks)

    def reset_target(self, num_target_blocks: int) -> None:
        """Begin with an empty target pool, the runner's KV being gone. Draft blocks lean on the target's, so their
        cache goes too. Every sequence must have released its blocks."""
        assert self.target_pool.num_held == 0
        self.target_pool = BlockPool(num_target_blocks, "target KV")
        self.draft_pool = _draft_pool(None if self.draft_pool is None else self.draft_pool.num_blocks)
        self.prefix_cache = PrefixCache(self.target_pool, self.draft_pool)

    def reset_draft(self, num_draft_blocks: int | None) -> None:
        """Begin with an empty draft pool; the target's cache stays. No sequence may hold draft blocks."""
        assert self.draft_pool is None or self.draft_pool.num_held == 0
        self.draft_pool = _draft_pool(num_draft_blocks)
        self.prefix_cache.clear_draft(self.draft_pool)

    def check_invariants(self) -> None:
        """Raises AssertionError when a block is lost, shared wrongly or miscounted."""
        self.target_pool.check_invariants()
        if self.draft_pool is not None:
            self.draft_pool.check_invariants()
        self.prefix_cache.check_invariants()

    def num_cached_blocks(self, chain: HashChain, token_ids: Int32Array, uses_draft: bool) -> int:
        """Leading blocks that `start` would take from the prefix cache now."""
        return len(self._find_cached(chain, token_ids, uses_draft)[0]) if self.enable_prefix_cache else 0

    def _has_spare(self, uses_draft: bool, count: int) -> bool:
        draft = self.draft_pool if uses_draft else None
        return self.target_pool.num_available >= count and (draft is None or draft.num_available >= count)

    def _find_cached(self, chain: HashChain, token_ids: Int32Array, uses_draft: bool) -> tuple[list[int], list[int]]:
        """(target ids, draft ids) of the leading blocks that are cached: as many of each, or the target's alone where
        the draft has less than half of them or is not used."""
        size = self.block_size
        num_blocks = (len(token_ids) - 1) // size
        chain.extend(token_ids, num_blocks)
        keys = chain.keys[:num_blocks]
        target_ids = self.prefix_cache.find_target(keys)
        if not uses_draft:
            return target_ids, []
        draft_keys: list[DraftBlockKey] = [
            (key, int(token_ids[(block + 1) * size])) for block, key in enumerate(keys[: len(target_ids)])
        ]
        draft_ids = self.prefix_cache.find_draft(draft_keys)
        if 2 * len(draft_ids) < len(target_ids):
            return target_ids, []
        return target_ids[: len(draft_ids)], draft_ids

    def _take_cached(self, blocks: SequenceBlocks, token_ids: Int32Array, uses_draft: bool) -> None:
        target_ids, draft_ids = self._find_cached(blocks.chain, token_ids, uses_draft)
        if uses_draft:
            assert self.draft_pool is not None
            if len(draft_ids) < len(target_ids):
                blocks.draft_start = len(target_ids) * self.block_size
            self.draft_pool.share(draft_ids)
            blocks.draft_ids = draft_ids
            blocks.num_published_draft = len(draft_ids)
        self.target_pool.share(target_ids)
        blocks.target_ids = target_ids
        blocks.num_published_target = len(target_ids)
        blocks.num_cached_tokens = len(target_ids) * self.block_size


def _draft_pool(num_blocks: int | None) -> BlockPool | None:
    return None if num_blocks is None else BlockPool(num_blocks, "draft KV")
