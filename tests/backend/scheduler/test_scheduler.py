"""The scheduler decides who gets rows and blocks. Block size 4; sequences advance by hand."""

import random

import numpy as np
import pytest

from kimi_backend.cache.kv_manager import KvManager
from kimi_backend.scheduler.scheduler import Scheduler, StepBatch
from kimi_backend.scheduler.sequence import DraftState, Finish, Sequence
from kimi_backend.scheduler.settings import SchedulerSettings
from kimi_backend.spec_decode.lookup import LookupMemory, SequenceLookup
from kimi_backend.types.request import FinishReason
from support.sequences import make_sequence

SIZE = 4


def make_scheduler(num_blocks: int = 64, num_draft_blocks: int | None = None, **settings: int) -> Scheduler:
    values = {"max_num_seqs": 8, "max_num_batched_tokens": 32, **settings}
    kv = KvManager(block_size=SIZE, num_target_blocks=num_blocks, num_draft_blocks=num_draft_blocks)
    return Scheduler(SchedulerSettings(**values), kv, 64)  # type: ignore[arg-type]


def prompt(length: int, start: int = 0) -> tuple[int, ...]:
    return tuple(range(start, start + length))


def rows_of(batch: StepBatch) -> dict[int, int]:
    return {s.uid: rows for s, rows in zip(batch.sequences, batch.num_rows, strict=True)}


def advance(batch: StepBatch, num_drafts: int = 0) -> None:
    """Advance as if the step had run: rows but drafts valid, one token drawn where the last known one was reached."""
    for sequence, rows in zip(batch.sequences, batch.num_rows, strict=True):
        sequence.target_len += rows - sequence.num_draft_tokens
        sequence.draft_len = sequence.target_len if sequence.uses_draft else 0
        if sequence.target_len == sequence.num_tokens:
            sequence.append([1])
            sequence.num_draft_tokens = num_drafts


def test_decodes_come_first_and_prefill_gets_the_rest() -> None:
    scheduler = make_scheduler()
    first, second = make_sequence(prompt(4), uid=0), make_sequence(prompt(60, 100), uid=1)
    scheduler.waiting.push(first)
    advance(scheduler.schedule(), num_drafts=3)
    scheduler.waiting.push(second)
    batch = scheduler.schedule()
    assert batch.num_decodes == 1
    assert rows_of(batch) == {0: 4, 1: 28}
    advance(batch)
    assert rows_of(scheduler.schedule()) == {0: 1, 1: 31}


def test_every_running_sequence_gets_a_row_however_tight_the_budget() -> None:
    scheduler = make_scheduler(max_num_seqs=4, max_num_batched_tokens=6)
    decoding = [make_sequence(prompt(1), uid=uid) for uid in range(3)]
    for sequence in decoding:
        scheduler.waiting.push(sequence)
    advance(scheduler.schedule(), num_drafts=3)
    scheduler.waiting.push(make_sequence(prompt(20, 50), uid=3))
    batch = scheduler.schedule()
    assert rows_of(batch) == {0: 4, 1: 1, 2: 1}, "drafts are trimmed from the back, and a newcomer needs a row"
    assert [s.num_draft_tokens for s in decoding] == [3, 0, 0]
    advance(batch)
    batch = scheduler.schedule()
    assert rows_of(batch) == {0: 1, 1: 1, 2: 1, 3: 3}
    advance(batch, num_drafts=3)
    assert rows_of(scheduler.schedule()) == {0: 3, 1: 1, 2: 1, 3: 1}


def test_older_prefills_are_served_before_younger_ones() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=16)
    for uid in range(3):
        scheduler.waiting.push(make_sequence(prompt(12, 100 * uid), uid=uid, max_num_tokens=500))
    batch = scheduler.schedule()
    assert rows_of(batch) == {0: 12, 1: 4}
    advance(batch)
    assert rows_of(scheduler.schedule()) == {0: 1, 1: 8, 2: 7}


def test_prompts_get_few_rows_beside_who_decodes_and_all_of_them_alone() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=24, max_prompt_tokens_beside_decode=10)
    for uid in range(2):
        scheduler.waiting.push(make_sequence(prompt(30, 100 * uid), uid=uid, max_num_tokens=500))
    advance(scheduler.schedule())
    batch = scheduler.schedule()
    assert rows_of(batch) == {0: 6, 1: 18}, "nobody decodes yet"
    advance(batch, num_drafts=3)
    scheduler.waiting.push(make_sequence(prompt(30, 200), uid=2, max_num_tokens=500))
    batch = scheduler.schedule()
    assert rows_of(batch) == {0: 4, 1: 10}
    advance(batch, num_drafts=3)
    batch = scheduler.schedule()
    assert rows_of(batch) == {0: 4, 1: 2, 2: 8}, "what the older prompt leaves is a newcomer's"
    advance(batch, num_drafts=3)
    for sequence in scheduler.running[:2]:
        sequence.finish = Finish(FinishReason.STOP)
        scheduler.finish(sequence)
    assert rows_of(scheduler.schedule()) == {2: 22}


def test_every_prompt_that_was_begun_goes_on_beside_who_decodes() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=12, max_prompt_tokens_beside_decode=1)
    for uid, length in enumerate((4, 20, 30)):
        scheduler.waiting.push(make_sequence(prompt(length, 100 * uid), uid=uid, max_num_tokens=500))
    advance(scheduler.schedule())
    assert rows_of(scheduler.schedule()) == {0: 1, 1: 1}, "a newcomer waits"


def test_priority_goes_before_arrival() -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    for uid, priority in enumerate((0, 5, 5, -1)):
        scheduler.waiting.push(make_sequence(uid=uid, priority=priority))
    order = []
    for _ in range(4):
        (sequence,) = scheduler.schedule().sequences
        order.append(sequence.uid)
        sequence.finish = Finish(FinishReason.STOP)
        scheduler.finish(sequence)
    assert order == [1, 2, 0, 3]


def test_the_head_of_the_queue_is_not_overtaken() -> None:
    scheduler = make_scheduler(num_blocks=16)
    running = make_sequence(prompt(40), uid=0)
    big, small = make_sequence(prompt(40, 50), uid=1), make_sequence(prompt(2, 90), uid=2)
    for sequence in (running, big, small):
        scheduler.waiting.push(sequence)
    advance(scheduler.schedule())
    assert rows_of(scheduler.schedule()) == {0: 8}
    running.finish = Finish(FinishReason.STOP)
    scheduler.finish(running)
    assert set(rows_of(scheduler.schedule())) == {1}


def test_a_finished_waiting_sequence_is_skipped() -> None:
    scheduler = make_scheduler()
    first, second = make_sequence(uid=0), make_sequence(uid=1)
    for sequence in (first, second):
        scheduler.waiting.push(sequence)
    first.finish = Finish(FinishReason.CANCELLED)
    scheduler.finish(first)
    assert len(scheduler.waiting) == 1
    assert rows_of(scheduler.schedule()) == {1: 3}
    assert not len(scheduler.waiting)


def test_those_who_leave_a_queue_in_which_nobody_comes_up_leave_no_memory_behind() -> None:
    scheduler, memory = make_scheduler(), LookupMemory(1 << 20)
    scheduler.waiting.push(make_sequence(uid=0))
    kept = []
    for uid in range(1, 400):
        sequence = make_sequence(uid=uid)
        sequence.lookup = SequenceLookup.of(sequence.token_ids, 4, memory)
        scheduler.waiting.push(sequence)
        if uid % 40 == 0:
            kept.append(sequence)
            continue
        sequence.finish = Finish(FinishReason.CANCELLED)
        scheduler.finish(sequence)
    assert len(scheduler.waiting) == 1 + len(kept)
    assert len(scheduler.waiting._heap) <= 2 * len(scheduler.waiting) + 16
    assert memory.num_bytes == sum(sequence.lookup.held_bytes for sequence in kept if sequence.lookup is not None)
    assert [sequence.uid for sequence in scheduler.waiting.snapshot()] == [0, *(sequence.uid for sequence in kept)]


def test_who_is_left_comes_up_in_order_though_many_have_left() -> None:
    scheduler, rng = make_scheduler(), random.Random(1)
    queue, left = scheduler.waiting, []
    sequences = [make_sequence(uid=uid, priority=rng.randrange(100)) for uid in range(100)]
    for sequence in sequences:
        queue.push(sequence)
    for sequence in sequences:
        if rng.random() < 0.8:
            sequence.finish = Finish(FinishReason.CANCELLED)
            scheduler.finish(sequence)
        else:
            left.append(sequence)
    in_order = sorted(left, key=lambda sequence: sequence.order)
    assert queue.snapshot() == in_order
    assert [queue.pop() for _ in range(len(queue))] == in_order
    assert queue.peek() is None


def test_a_queue_is_gone_through_once_it_holds_sixteen_more_than_twice_who_waits() -> None:
    """It is not gone through each time that somebody leaves."""
    scheduler, lengths = make_scheduler(), []
    scheduler.waiting.push(make_sequence(uid=0))
    for uid in range(1, 100):
        sequence = make_sequence(uid=uid)
        scheduler.waiting.push(sequence)
        sequence.finish = Finish(FinishReason.CANCELLED)
        scheduler.finish(sequence)
        lengths.append(len(scheduler.waiting._heap))
    assert (min(lengths), max(lengths)) == (1, 18)


def grow_until_preemption(scheduler: Scheduler, sequences: list[Sequence]) -> list[int]:
    """Decode until somebody is preempted; returns who."""
    for _ in range(60):
        advance(scheduler.schedule())
        preempted = [s.uid for s in sequences if s.num_preemptions]
        if preempted:
            return preempted
    raise AssertionError("nobody was preempted")


@pytest.mark.parametrize(("priorities", "victim"), [((0, 0, 0), 2), ((0, -1, 0), 1), ((1, 2, 2), 0)])
def test_the_lowest_priority_then_the_youngest_is_preempted(priorities: tuple[int, ...], victim: int) -> None:
    scheduler = make_scheduler(num_blocks=16)
    sequences = [make_sequence(prompt(6, 10 * uid), uid=uid, priority=p, k=0) for uid, p in enumerate(priorities)]
    for sequence in sequences:
        scheduler.waiting.push(sequence)
    assert grow_until_preemption(scheduler, sequences) == [victim]
    preempted = sequences[victim]
    assert (preempted.blocks, preempted.row, preempted.target_len) == (None, -1, 0)
    assert preempted.num_output_tokens > 0
    scheduler.kv.check_invariants()


def test_a_preempted_sequence_returns_before_later_arrivals() -> None:
    scheduler = make_scheduler(num_blocks=16)
    sequences = [make_sequence(prompt(6, 10 * uid), uid=uid, k=0) for uid in range(3)]
    for sequence in sequences:
        scheduler.waiting.push(sequence)
    grow_until_preemption(scheduler, sequences)
    late = make_sequence(prompt(6, 90), uid=9)
    scheduler.waiting.push(late)
    assert scheduler.waiting.peek() is sequences[2]
    for sequence in sequences[:2]:
        sequence.finish = Finish(FinishReason.STOP)
        scheduler.finish(sequence)
    batch = scheduler.schedule()
    assert rows_of(batch)[2] == sequences[2].num_tokens
    assert list(rows_of(batch)) == [2, 9]


def test_slots_for_both_pools_are_taken_before_the_step() -> None:
    """Target n + k + 1, draft n + k + k'; a finishing prefill n and n + k' - 1."""
    scheduler = make_scheduler(num_draft_blocks=64)
    sequence = make_sequence(prompt(4), k=7)
    scheduler.waiting.push(sequence)
    batch = scheduler.schedule()
    assert sequence.blocks is not None
    assert (len(sequence.blocks.target_ids), len(sequence.blocks.draft_ids)) == (1, 3)  # 4 and 4 + 6 slots
    advance(batch, num_drafts=7)
    scheduler.schedule()
    assert (len(sequence.blocks.target_ids), len(sequence.blocks.draft_ids)) == (3, 5)  # 12 and 12 + 6 slots


def test_slots_end_where_the_sequence_must_end() -> None:
    scheduler = make_scheduler(num_draft_blocks=64)
    sequence = make_sequence(prompt(4), k=7, max_num_tokens=8)
    scheduler.waiting.push(sequence)
    batch = scheduler.schedule()
    assert sequence.blocks is not None
    advance(batch, num_drafts=sequence.speculation.num_draft_tokens(3))
    assert sequence.num_draft_tokens == 2
    scheduler.schedule()
    assert (len(sequence.blocks.target_ids), len(sequence.blocks.draft_ids)) == (2, 2)


def test_a_newcomer_leaves_a_block_for_each_running_sequence() -> None:
    scheduler = make_scheduler(num_blocks=6)
    scheduler.waiting.push(make_sequence(prompt(8), uid=0, k=0))
    advance(scheduler.schedule())
    newcomer = make_sequence(prompt(13, 50), uid=1, k=0)
    scheduler.waiting.push(newcomer)
    assert 1 not in rows_of(scheduler.schedule()), "3 blocks are left, it needs 4"
    other = make_scheduler(num_blocks=6)
    other.waiting.push(make_sequence(prompt(8), uid=0, k=0))
    advance(other.schedule())
    other.waiting.push(make_sequence(prompt(9, 50), uid=1, k=0))
    assert 1 not in rows_of(other.schedule()), "it needs all 3 that are left, and one must stay"
    other.waiting.pop()
    other.waiting.push(make_sequence(prompt(8, 50), uid=2, k=0))
    assert rows_of(other.schedule())[2] == 8


def test_block_tables_hold_the_blocks_in_order() -> None:
    scheduler = make_scheduler(num_draft_blocks=64)
    sequence = make_sequence(prompt(9), k=3)
    scheduler.waiting.push(sequence)
    for _ in range(6):
        advance(scheduler.schedule(), num_drafts=3)
        assert sequence.blocks is not None
        for table, ids in (
            (scheduler.table.target_blocks, sequence.blocks.target_ids),
            (scheduler.table.draft_blocks, sequence.blocks.draft_ids),
        ):
            np.testing.assert_array_equal(table[sequence.row, : len(ids)], ids)


def publish(scheduler: Scheduler) -> None:
    """Publish blocks as the engine does behind each step."""
    for s in scheduler.running:
        assert s.blocks is not None
        scheduler.kv.publish(s.blocks, s.token_ids, s.target_len, s.publishable_draft_len)


@pytest.mark.parametrize("num_draft_blocks", [None, 64])
def test_one_prompt_of_several_sequences_is_computed_once(num_draft_blocks: int | None) -> None:
    scheduler = make_scheduler(num_draft_blocks=num_draft_blocks, max_num_batched_tokens=16)
    for uid in range(4):
        scheduler.waiting.push(make_sequence(prompt(18), uid=uid))
    scheduler.waiting.push(make_sequence(prompt(1, 90), uid=4))
    batch = scheduler.schedule()
    assert rows_of(batch) == {0: 16}, "those with the same prompt wait"
    advance(batch)
    publish(scheduler)
    batch = scheduler.schedule()
    assert rows_of(batch) == {0: 2, 1: 2, 2: 2, 3: 2, 4: 1}, "all that is behind the full blocks"
    advance(batch)
    publish(scheduler)
    pools = [scheduler.kv.target_pool] + ([scheduler.kv.draft_pool] if scheduler.kv.draft_pool else [])
    assert [pool.num_held for pool in pools] == [4 + 4 + 1] * len(pools), "4 shared blocks, and one of its own each"
    for sequence in scheduler.running.copy():
        scheduler.finish(sequence)
    assert [pool.num_held for pool in pools] == [0] * len(pools)
    scheduler.kv.check_invariants()


def test_others_pass_whoever_waits_for_a_prompt() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=16)
    scheduler.waiting.push(make_sequence(prompt(30), uid=0))
    advance(scheduler.schedule())
    publish(scheduler)
    scheduler.waiting.push(make_sequence(prompt(30), uid=1))
    scheduler.waiting.push(make_sequence(prompt(2, 90), uid=2))
    batch = scheduler.schedule()
    assert rows_of(batch) == {0: 14, 2: 2}
    scheduler.preempt(scheduler.running[0])
    assert scheduler.waiting.snapshot()[0].uid == 0


def test_nobody_waits_for_a_draft_that_does_not_come() -> None:
    scheduler = make_scheduler(num_draft_blocks=64, max_num_batched_tokens=16)
    scheduler.waiting.push(make_sequence(prompt(30), uid=0, k=0))
    advance(scheduler.schedule())
    publish(scheduler)
    scheduler.waiting.push(make_sequence(prompt(30), uid=1))
    assert rows_of(scheduler.schedule()) == {0: 14, 1: 2}


@pytest.mark.parametrize(
    ("num_draft_blocks", "k", "state"),
    [(None, 3, DraftState.AWAY), (None, 0, DraftState.AWAY), (64, 0, DraftState.OUT), (64, 3, DraftState.ON)],
)
def test_a_start_says_whether_the_draft_is_there(num_draft_blocks: int | None, k: int, state: DraftState) -> None:
    """Whatever it was at the start before; one for which the draft failed goes on without."""
    for before in DraftState:
        scheduler = make_scheduler(num_draft_blocks=num_draft_blocks)
        sequence = make_sequence(prompt(4), k=k)
        sequence.draft = before
        scheduler.waiting.push(sequence)
        scheduler.schedule()
        assert sequence.draft is (before if before is DraftState.NEVER else state)
