"""The holders of every KV block: ids, reference counts and eviction order. No tensor is touched here."""

from collections.abc import Callable, Iterable, Sequence

from kimi_backend.errors import CapacityError


class BlockPool:
    """Blocks of one KV pool, each free, held by sequences, or kept for reuse after its last holder left.

    A block is *cached* while a prefix cache knows its content. A cached block that nobody holds stays out of the free
    list until memory is needed; then the one that was released longest ago goes first.
    """

    def __init__(self, num_blocks: int, name: str = "KV") -> None:
        """name: what error messages call the pool."""
        if num_blocks < 1:
            raise CapacityError(f"{name} pool: num_blocks is {num_blocks}, at least 1 is needed")
        self.name = name
        self.num_blocks = num_blocks
        self.on_evict: Callable[[int], None] | None = None
        """Told of each cached block that is about to be reused, after it stopped being cached."""
        self._free = list(range(num_blocks - 1, -1, -1))
        self._ref_counts = [0] * num_blocks
        self._is_cached = [False] * num_blocks
        self._evictable: dict[int, None] = {}  # insertion order is release order

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` can hand out now: free ones and those only kept for reuse."""
        return len(self._free) + len(self._evictable)

    @property
    def num_held(self) -> int:
        """Blocks that at least one sequence holds."""
        return self.num_blocks - self.num_available

    @property
    def num_cached(self) -> int:
        return sum(self._is_cached)

    def ref_count(self, block_id: int) -> int:
        return self._ref_counts[block_id]

    def is_cached(self, block_id: int) -> bool:
        return self._is_cached[block_id]

    def allocate(self, count: int) -> list[int]:
        """Hand out `count` blocks with one holder each, evicting cached ones as needed.

        Raises:
            CapacityError: fewer are available; nothing has changed then.
        """
        if count > self.num_available:
            raise CapacityError(
                f"{self.name} pool is full: asked for {count} blocks,"
                f" {self.num_available} of {self.num_blocks} available"
            )
        while len(self._free) < count:
            self._evict(next(iter(self._evictable)))
        block_ids = [self._free.pop() for _ in range(count)]
        for block_id in block_ids:
            self._ref_counts[block_id] = 1
        return block_ids

    def share(self, block_ids: Iterable[int]) -> None:
        """Add a holder to blocks that are held or cached."""
        for block_id in block_ids:
            if self._ref_counts[block_id] == 0:
                del self._evictable[block_id]
            self._ref_counts[block_id] += 1

    def release(self, block_ids: Sequence[int]) -> None:
        """Take one holder off each block. Later blocks of a sequence become evictable before earlier ones, because a
        prefix is of no use without its beginning."""
        for block_id in reversed(block_ids):
            count = self._ref_counts[block_id]
            assert count > 0, f"{self.name} pool: block {block_id} released more often than held"
            self._ref_counts[block_id] = count - 1
            if count == 1:
                self._drop(block_id)

    def set_cached(self, block_id: int) -> None:
        """Note that a prefix cache knows this held block's content."""
        assert self._ref_counts[block_id] > 0, f"{self.name} pool: block {block_id} cached while nobody holds it"
        self._is_cached[block_id] = True

    def clear_cached(self, block_id: int) -> None:
        """Note that no prefix cache knows this block any more; free it if nobody holds it."""
        self._is_cached[block_id] = False
        if self._ref_counts[block_id] == 0:
            del self._evictable[block_id]
            self._free.append(block_id)

    def check_invariants(self) -> None:
        """Every block is in exactly one state. For tests and idle moments.

        Raises:
            AssertionError: a block is lost, shared between states, or miscounted.
        """
        free = set(self._free)
        assert len(free) == len(self._free), f"{self.name} pool: a block is free twice"
        for block_id in range(self.num_blocks):
            states = (block_id in free, block_id in self._evictable, self._ref_counts[block_id] > 0)
            assert sum(states) == 1, f"{self.name} pool: block {block_id} is (free, evictable, held) = {states}"
            assert not (block_id in free and self._is_cached[block_id]), f"{self.name} pool: {block_id} free yet cached"
            assert block_id not in self._evictable or self._is_cached[block_id], f"{self.name} pool: {block_id} lost"

    def _drop(self, block_id: int) -> None:
        if self._is_cached[block_id]:
            self._evictable[block_id] = None
        else:
            self._free.append(block_id)

    def _evict(self, block_id: int) -> None:
        self.clear_cached(block_id)
        if self.on_evict is not None:
            self.on_evict(block_id)
