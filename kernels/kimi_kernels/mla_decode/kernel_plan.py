"""The work plan of `mla_decode`: which team of thread blocks attends which keys, from lengths on the device.

An item is a sequence and a group of TEAM row tiles. Balanced plan, two ways. If it leaves no team with much more than
its share, every item is cut into equal pieces, one piece a team: fewest partial results. Else (after stream-K, Osama et
al. 2023) items stand in one line, each as long as its key tiles plus a fixed cost, and the line is cut into equal
lengths, one a team; a team's part is a run of segments. Items of nearly one length count as long as the longest, so
that none is cut. Fixed plan: every item is cut at multiples of SPLIT key tiles, whatever stands beside it.

records: [num_teams + items * pieces, 16] int32. Record t is team t's first segment, its further ones are at
    num_teams + field 9 + 1, + 2, ...: 0 sequence, 1 first query row, 2 query rows, 3 first row tile, 4 first key tile,
    5 end key tile, 6 slot or -1 (result is complete), 7 sequence length, 8 segments of the team, 9 its first item.
entries: [1 + items, 8] int32. Row 0: number of items. Row 1 + i: how item i is merged: 0 first query row,
    1 query rows, 2 first row tile, 3 first slot, 4 slots (1: nothing to merge).
"""

import triton
import triton.language as tl

RECORD = tl.constexpr(16)
ENTRY = tl.constexpr(8)


@triton.jit
def _pick(values, index, at):
    """values[at] of a vector held in registers."""
    return tl.sum(tl.where(index == at, values, 0))


@triton.jit
def _write_record(records, at, seq, row, num_rows, tile, first, end, slot, length):
    record = records + at * RECORD
    tl.store(record + 0, seq)
    tl.store(record + 1, row)
    tl.store(record + 2, num_rows)
    tl.store(record + 3, tile)
    tl.store(record + 4, first)
    tl.store(record + 5, end)
    tl.store(record + 6, slot)
    tl.store(record + 7, length)


@triton.jit
def _write_entry(entries, item, row, num_rows, tile, slot, num_slots):
    entry = entries + (1 + item) * ENTRY
    tl.store(entry + 0, row)
    tl.store(entry + 1, num_rows)
    tl.store(entry + 2, tile)
    tl.store(entry + 3, slot)
    tl.store(entry + 4, num_slots)


@triton.jit
def _load_batch(
    cu_seqlens_q, seq_lens, num_seqs, num_heads, SEQS: tl.constexpr, ROWS: tl.constexpr, TEAM: tl.constexpr
):
    """Load every sequence's first query row, query rows, length and groups of TEAM row tiles (0 without rows)."""
    index = tl.arange(0, SEQS)
    exists = index < num_seqs
    row = tl.load(cu_seqlens_q + index, mask=exists, other=0)
    num_rows = tl.load(cu_seqlens_q + index + 1, mask=exists, other=0) - row
    num_rows = tl.where(exists, tl.maximum(num_rows, 0), 0)
    length = tl.maximum(tl.load(seq_lens + index, mask=exists, other=0), 0)
    groups = tl.cdiv(tl.cdiv(num_rows * num_heads, ROWS), TEAM)
    return index, row, num_rows, length, groups


@triton.jit
def _piece_size(groups, tiles, num_teams):
    """Fewest key tiles a piece such that all pieces together are no more than the teams (if items are not)."""
    low = tl.maximum(tl.cdiv(tl.sum(groups * tiles), num_teams), 1)
    high = tl.maximum(tl.max(tiles), 1)
    while low < high:
        middle = (low + high) // 2
        fits = tl.sum(groups * tl.maximum(tl.cdiv(tiles, middle), 1)) <= num_teams
        high = tl.where(fits, middle, high)
        low = tl.where(fits, low, middle + 1)
    return high


@triton.jit
def _plan_piece(
    records, entries, index, row, num_rows, length, groups, tiles, size, team, num_seqs, TEAM: tl.constexpr
):
    """Give a team its one piece, if there are that many."""
    pieces = tl.maximum(tl.cdiv(tiles, size), 1)
    after = tl.cumsum(groups * pieces)
    tl.store(records + team * RECORD + 8, (team < tl.max(after)).to(tl.int32))
    tl.store(records + team * RECORD + 9, 0)
    if team < tl.max(after):
        seq = tl.sum((after <= team).to(tl.int32))
        num_pieces = _pick(pieces, index, seq)
        inside = team - (_pick(after, index, seq) - _pick(groups, index, seq) * num_pieces)
        group = inside // num_pieces
        piece = inside % num_pieces
        num_tiles = _pick(tiles, index, seq)
        first_row = _pick(row, index, seq)
        rows = _pick(num_rows, index, seq)
        slot = tl.where(num_pieces == 1, -1, 2 * team + (piece == 0).to(tl.int32))
        _write_record(
            records, team, seq, first_row, rows, group * TEAM, piece * num_tiles // num_pieces,
            (piece + 1) * num_tiles // num_pieces, slot, _pick(length, index, seq),
        )  # fmt: skip
        if piece == 0:
            item = tl.sum(tl.where(index < seq, groups, 0)) + group
            _write_entry(entries, item, first_row, rows, group * TEAM, 2 * team, num_pieces)


@triton.jit(do_not_specialize=["num_seqs", "num_teams"], do_not_specialize_on_alignment=["seq_lens"])
def plan_balanced_kernel(
    cu_seqlens_q,  # [num_seqs + 1] int32
    seq_lens,  # [num_seqs] int32
    records,
    entries,
    num_seqs,
    num_heads,
    num_teams,
    SEQS: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    TEAM: tl.constexpr,
    COST: tl.constexpr,  # of a segment, in key tiles
    SLACK: tl.constexpr,  # percent of its share that a team may get in one piece
):
    team = tl.program_id(0)
    index, row, num_rows, length, groups = _load_batch(cu_seqlens_q, seq_lens, num_seqs, num_heads, SEQS, ROWS, TEAM)
    tiles = tl.cdiv(length, KEYS)
    if team == 0:
        tl.store(entries, tl.sum(groups))
    size = _piece_size(groups, tiles, num_teams)
    if (tl.sum(groups) <= num_teams) & (size * 100 <= tl.maximum(tl.sum(groups * tiles) * SLACK // num_teams, 100)):
        _plan_piece(records, entries, index, row, num_rows, length, groups, tiles, size, team, num_seqs, TEAM)
        return
    # When teams get a handful of tiles each, a charge for segments would leave some of them without any.
    cost = tl.where(tl.sum(groups * tiles) > 4 * num_teams, COST, 0)
    item_size = tl.maximum(tiles + cost, 1)
    share = tl.maximum(tl.cdiv(tl.sum(groups * item_size), num_teams), 1)
    # Items stay whole, so that nothing has to be merged, where that gives no team more than a tile above its share.
    longest = tl.max(tl.where(groups > 0, item_size, 1))
    whole_share = tl.cdiv(tl.sum(groups), num_teams) * longest
    if whole_share <= share + 1:
        item_size = tl.full([SEQS], 1, tl.int32) * longest
        share = whole_share
    after = tl.cumsum(groups * item_size)
    begin = team * share
    end = begin + share
    seq = tl.sum((after <= begin).to(tl.int32))
    count = 0
    first_item = 0
    start = begin
    group = 0
    if seq < num_seqs:
        size = _pick(item_size, index, seq)
        start = _pick(after, index, seq) - _pick(groups, index, seq) * size
        group = (begin - start) // size
        start += group * size
    item = tl.sum(tl.where(index < seq, groups, 0)) + group
    while (seq < num_seqs) & (start < end):
        num_tiles = _pick(tiles, index, seq)
        key = start + cost
        first = tl.maximum(begin - key, 0)
        last = tl.minimum(end - key, num_tiles)
        owns_empty = (num_tiles == 0) & (start >= begin)
        if (last > first) | owns_empty:
            whole = (first == 0) & (last == num_tiles)
            slot = tl.where(whole, -1, 2 * team + (first == 0).to(tl.int32))
            at = tl.where(count == 0, team, num_teams + item)
            first_row = _pick(row, index, seq)
            rows = _pick(num_rows, index, seq)
            _write_record(
                records, at, seq, first_row, rows, group * TEAM, first, tl.maximum(last, first), slot,
                _pick(length, index, seq),
            )  # fmt: skip
            if first == 0:
                last_team = tl.where(num_tiles == 0, team, (key + num_tiles - 1) // share)
                _write_entry(entries, item, first_row, rows, group * TEAM, 2 * team, last_team - team + 1)
            first_item = tl.where(count == 0, item, first_item)
            count += 1
        start += _pick(item_size, index, seq)
        item += 1
        group += 1
        if group >= _pick(groups, index, seq):
            group = 0
            seq += 1
            while (seq < num_seqs) & (_pick(groups, index, seq) == 0):
                seq += 1
    tl.store(records + team * RECORD + 8, count)
    tl.store(records + team * RECORD + 9, first_item)


@triton.jit(do_not_specialize=["num_seqs", "num_teams"], do_not_specialize_on_alignment=["seq_lens"])
def plan_fixed_kernel(
    cu_seqlens_q,  # [num_seqs + 1] int32
    seq_lens,  # [num_seqs] int32
    records,
    entries,
    num_seqs,
    num_heads,
    num_teams,
    SEQS: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    TEAM: tl.constexpr,
    SPLIT: tl.constexpr,  # key tiles of a piece
):
    team = tl.program_id(0)
    index, row, num_rows, length, groups = _load_batch(cu_seqlens_q, seq_lens, num_seqs, num_heads, SEQS, ROWS, TEAM)
    tiles = tl.cdiv(length, KEYS)
    pieces = tl.maximum(tl.cdiv(tiles, SPLIT), 1)
    after = tl.cumsum(groups * pieces)
    num_units = tl.max(after)
    share = tl.cdiv(num_units, num_teams)
    if team == 0:
        tl.store(entries, tl.sum(groups))
    begin = team * share
    count = tl.maximum(tl.minimum(begin + share, num_units) - begin, 0)
    for unit in range(begin, begin + count):
        seq = tl.sum((after <= unit).to(tl.int32))
        num_pieces = _pick(pieces, index, seq)
        inside = unit - (_pick(after, index, seq) - _pick(groups, index, seq) * num_pieces)
        group = inside // num_pieces
        piece = inside % num_pieces
        num_tiles = _pick(tiles, index, seq)
        first_row = _pick(row, index, seq)
        rows = _pick(num_rows, index, seq)
        slot = tl.where(num_pieces > 1, unit, -1)
        at = tl.where(unit == begin, team, num_teams + unit)
        _write_record(
            records, at, seq, first_row, rows, group * TEAM, piece * SPLIT,
            tl.minimum((piece + 1) * SPLIT, num_tiles), slot, _pick(length, index, seq),
        )  # fmt: skip
        if piece == 0:
            item = tl.sum(tl.where(index < seq, groups, 0)) + group
            _write_entry(entries, item, first_row, rows, group * TEAM, unit, num_pieces)
    tl.store(records + team * RECORD + 8, count)
    tl.store(records + team * RECORD + 9, begin)
