"""A draft step that was answered before it was done: what the engine remembers until a verify has read its tokens."""

from collections.abc import Iterator
from dataclasses import dataclass

from kimi_backend.cache.kv_manager import SequenceBlocks
from kimi_backend.scheduler.plan_builder import DraftWork
from kimi_backend.types.plan import TokenHandle


@dataclass(frozen=True, slots=True)
class UnreadDraft:
    """Its rows count as valid KV, and its failures are known, only with the next verify."""

    tokens: TokenHandle
    work: list[DraftWork]
    """Of each sequence in the draft's plan."""
    blocks: list[SequenceBlocks | None]
    """What each of them held then: one that was preempted since, started again or not, holds others or none."""

    @classmethod
    def of(cls, tokens: TokenHandle, work: list[DraftWork]) -> "UnreadDraft":
        return cls(tokens, work, [item.sequence.blocks for item in work])

    def still_there(self, status: list[int]) -> Iterator[tuple[DraftWork, int]]:
        """Those that have run on since with their draft, each with its entry of `status`."""
        for item, blocks, its_status in zip(self.work, self.blocks, status, strict=True):
            if blocks is not None and item.sequence.blocks is blocks and blocks.uses_draft:
                yield item, its_status
