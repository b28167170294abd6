"""KV slots that remember what wrote them and refuse to be read as anything else."""

from enum import IntEnum

import numpy as np
import numpy.typing as npt

from support.check_errors import StaleSlotError
from support.scripted_logits import ROOT, Hashes, mix


class SlotKind(IntEnum):
    EMPTY = 0
    VALID = 1
    REJECTED = 2
    """A verify row behind the last accepted one."""
    PROVISIONAL = 3
    """A row of the draft's single-row steps."""


class SlotStore:
    """One pool's slots: the prefix hash, token and kind of the row that wrote each."""

    def __init__(self, num_blocks: int, block_size: int, name: str) -> None:
        self.name = name
        self.block_size = block_size
        self.hashes = np.zeros(num_blocks * block_size, np.uint64)
        self.token_ids = np.full(num_blocks * block_size, -1, np.int64)
        self.positions = np.full(num_blocks * block_size, -1, np.int64)
        self.kinds = np.zeros(num_blocks * block_size, np.int8)

    def slots(self, block_table: npt.NDArray[np.int32], positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """block_table: [S, max_blocks]; positions: [S, N] -> [S, N]."""
        blocks = np.take_along_axis(block_table.astype(np.int64), positions // self.block_size, axis=1)
        return blocks * self.block_size + positions % self.block_size

    def read_prefixes(
        self, block_table: npt.NDArray[np.int32], lengths: npt.NDArray[np.int64], *, checks: bool = True
    ) -> Hashes:
        """[S] hash stored in the last slot of each prefix (ROOT for an empty one), after checking every slot of it.

        Args:
            checks: False leaves the checks out.

        Raises:
            StaleSlotError: a slot is not a valid row of this very prefix.
        """
        longest = int(lengths.max(initial=0))
        last = np.full(len(lengths), ROOT)
        if not longest:
            return last
        is_read = np.arange(longest) < lengths[:, None]
        positions = np.where(is_read, np.arange(longest), 0)
        slots = self.slots(block_table, positions)
        if checks:
            self._check_prefixes(is_read, slots, positions)
        has_prefix = lengths > 0
        last[has_prefix] = self.hashes[slots[has_prefix, lengths[has_prefix] - 1]]
        return last

    def _check_prefixes(
        self, is_read: npt.NDArray[np.bool_], slots: npt.NDArray[np.int64], positions: npt.NDArray[np.int64]
    ) -> None:
        self._check(is_read & (self.kinds[slots] != SlotKind.VALID), slots, positions, "its row is not valid")
        self._check(is_read & (self.positions[slots] != positions), slots, positions, "it holds another position")
        chained = mix(self.hashes[slots[:, :-1]], self.token_ids[slots[:, 1:]]) == self.hashes[slots[:, 1:]]
        broken = np.zeros_like(is_read)
        broken[:, 1:] = is_read[:, 1:] & ~chained
        self._check(broken, slots, positions, "it continues another prefix")

    def write(
        self,
        slots: npt.NDArray[np.int64],
        hashes: Hashes,
        token_ids: npt.NDArray[np.int64],
        positions: npt.NDArray[np.int64],
        kind: SlotKind,
    ) -> None:
        """All flat, [N]."""
        if len(np.unique(slots)) != len(slots):
            raise StaleSlotError(f"{self.name}: two rows of one step write the same slot")
        self.hashes[slots] = hashes
        self.token_ids[slots] = token_ids
        self.positions[slots] = positions
        self.kinds[slots] = kind

    def _check(
        self, wrong: npt.NDArray[np.bool_], slots: npt.NDArray[np.int64], positions: npt.NDArray[np.int64], why: str
    ) -> None:
        if wrong.any():
            sequence, column = (int(axis[0]) for axis in np.nonzero(wrong))
            slot = int(slots[sequence, column])
            raise StaleSlotError(
                f"{self.name}: sequence {sequence} of the plan reads slot {slot} at position"
                f" {positions[sequence, column]}: {why} ({SlotKind(int(self.kinds[slot])).name})"
            )
