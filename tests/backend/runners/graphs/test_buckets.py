import pytest

from kimi_backend.runners.graphs.buckets import (
    Bucket,
    batch_sizes,
    chosen_batch_sizes,
    prompt_buckets,
    proposal_buckets,
    query_lens,
    row_buckets,
    smallest_fitting,
)


@pytest.mark.parametrize("most", [1, 2, 5, 8, 64, 100, 256])
def test_a_bucket_is_never_more_than_half_again_too_large(most: int) -> None:
    sizes = batch_sizes(most)
    assert sizes[-1] == most
    for count in range(1, most + 1):
        smallest = next(size for size in sizes if size >= count)
        assert smallest <= max(count, 3 * (count - 1) // 2 + 1)


def test_chosen_sizes_are_captured_with_the_largest_there_is() -> None:
    assert chosen_batch_sizes(64, ()) == batch_sizes(64)
    assert chosen_batch_sizes(64, (16, 1, 4)) == [1, 4, 16, 64]
    assert chosen_batch_sizes(8, (16, 1)) == [1, 8]
    buckets = row_buckets(chosen_batch_sizes(64, (1, 16)), 4, 2048)
    assert smallest_fitting(buckets, 2, 1, 2) == Bucket.of(16, 1)


def test_every_verify_finds_a_bucket() -> None:
    buckets = row_buckets(batch_sizes(64), 8, 2048)
    for num_seqs in range(1, 65):
        for query_len in range(1, 9):
            bucket = smallest_fitting(buckets, num_seqs, query_len, num_seqs * query_len)
            assert bucket is not None
            assert bucket.num_rows <= 2 * num_seqs * query_len
    assert smallest_fitting(buckets, 65, 1, 65) is None
    assert smallest_fitting(buckets, 1, 9, 9) is None


def test_exact_shapes_have_no_padding() -> None:
    buckets = row_buckets(batch_sizes(64), 8, 2048)
    for num_seqs in (1, 4, 16, 64):
        for query_len in (1, 4):
            expected = Bucket.of(num_seqs, query_len)
            assert smallest_fitting(buckets, num_seqs, query_len, num_seqs * query_len) == expected


def test_no_bucket_has_more_rows_than_a_step() -> None:
    assert max(bucket.num_rows for bucket in row_buckets(batch_sizes(64), 8, 100)) <= 100


def test_the_largest_comes_first() -> None:
    for buckets in (row_buckets(batch_sizes(16), 8, 2048), proposal_buckets(batch_sizes(16), 7)):
        rows = [bucket.num_rows for bucket in buckets]
        assert rows == sorted(rows, reverse=True)
        assert len(set(buckets)) == len(buckets)


def test_proposals_are_drawn_in_exactly_as_many_steps() -> None:
    buckets = proposal_buckets(batch_sizes(8), 7)
    for num_proposals in range(1, 8):
        bucket = smallest_fitting(buckets, 5, 1, 5, num_proposals)
        assert bucket == Bucket.of(6, 1, num_proposals)
    assert smallest_fitting(buckets, 3, 1, 3, 0) is None
    assert smallest_fitting(buckets, 3, 1, 3, 8) is None


def test_query_lens_end_with_the_longest() -> None:
    assert query_lens(1) == [1]
    assert query_lens(4) == [1, 2, 3, 4]
    assert query_lens(8) == [1, 2, 3, 4, 6, 8]


def test_a_chunk_takes_a_prompts_bucket_and_a_verify_never_does() -> None:
    buckets = [*row_buckets([16], 4, 2048), *prompt_buckets(16, 2048, 8)]
    assert smallest_fitting(buckets, 16, 4, 19) == Bucket.of(16, 4)
    chunk = smallest_fitting(buckets, 16, 5, 20)
    assert chunk is not None and chunk.cuts_chunks and chunk.num_rows == 24
    for num_rows in range(5, 2049):
        found = smallest_fitting(buckets, 1, num_rows, num_rows)
        assert found is not None and num_rows <= found.num_rows <= max(16, 3 * (num_rows - 1) // 2 + 1)
    assert smallest_fitting(buckets, 1, 2049, 2049) is None


@pytest.mark.parametrize(
    ("num_heads", "most", "most_parts"), [(8, 2048, 272), (16, 1024, 272), (64, 256, 272), (None, 2048, 48)]
)
def test_a_rank_of_few_heads_captures_more_rows(num_heads: int | None, most: int, most_parts: int) -> None:
    buckets = prompt_buckets(16, 8192, num_heads)
    assert (buckets[0].num_rows, buckets[0].num_parts) == (most, most_parts)
    assert buckets[-1].num_rows == 16
    assert prompt_buckets(16, 15, num_heads) == []
