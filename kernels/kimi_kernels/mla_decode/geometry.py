"""The cut of `mla_decode`'s problem: host arithmetic shared by the work plan and the kernels that follow it.

Rows of a sequence are its query tokens times its heads, packed: row r is token r // num_heads, head r % num_heads. A
*tile* is `tile_rows` of them against `tile_keys` keys at a time. A *team* of `team_size` thread blocks reads the same
keys at the same time for as many tiles of one sequence, so that keys come from memory once and from L2 after that.
"""

from dataclasses import dataclass

from kimi_kernels.attention_batch import DecodePlan

MAX_TEAM_SIZE = 8
TILE_KEYS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeGeometry:
    """Everything about a plan that the host knows."""

    num_heads: int
    block_size: int
    tile_rows: int
    tile_keys: int
    team_size: int
    num_teams: int
    max_items: int
    """Most (sequence, group of `team_size` tiles) pairs of the batch."""
    max_pieces: int
    """Most pieces an item is cut into, 1 when the plan balances over the batch."""
    split_tokens: int

    @property
    def num_slots(self) -> int:
        """Partial results a team member may leave behind."""
        return self.max_items * self.max_pieces if self.split_tokens else 2 * self.num_teams

    @property
    def num_records(self) -> int:
        """One for each team's first segment, one for each further segment."""
        return self.num_teams + self.max_items * self.max_pieces


@dataclass(frozen=True, slots=True, kw_only=True)
class TritonDecodePlan(DecodePlan):
    """`DecodePlan.tensors` are (records, entries), see kernel_plan.py; `geometry` says how to read them."""

    geometry: DecodeGeometry


def decode_geometry(
    *,
    num_heads: int,
    block_size: int,
    num_seqs: int,
    max_query_len: int,
    max_seq_len: int,
    split_tokens: int,
    num_processors: int,
) -> DecodeGeometry:
    """Choose tiles and teams.

    Raises:
        ValueError: `split_tokens` is not a multiple of the keys in a tile.
    """
    if split_tokens < 0 or split_tokens % TILE_KEYS:
        raise ValueError(f"split_tokens is {split_tokens}; allowed are 0 and multiples of {TILE_KEYS}")
    # With fixed splits a row's bits must not depend on the rows beside it, so its tile follows from the heads alone.
    usual_rows = num_heads * (1 if split_tokens else max_query_len)
    tile_rows = 16 if usual_rows <= 16 else 32 if usual_rows <= 32 else 64
    if num_seqs == 1 and 32 < usual_rows <= 64 and not split_tokens:
        tile_rows = 32  # One sequence leaves multiprocessors idle: two of them share its rows.
    max_tiles = max(1, -(-num_heads * max_query_len // tile_rows))
    team_size = min(max_tiles, MAX_TEAM_SIZE)
    return DecodeGeometry(
        num_heads=num_heads,
        block_size=block_size,
        tile_rows=tile_rows,
        tile_keys=TILE_KEYS,
        team_size=team_size,
        num_teams=max(1, num_processors // team_size),
        max_items=num_seqs * -(-max_tiles // team_size),
        max_pieces=max(1, -(-max_seq_len // split_tokens)) if split_tokens else 1,
        split_tokens=split_tokens,
    )
