"""The Hopper kernel that takes each problem: host arithmetic, no device."""

import pytest

from kimi_kernels.mla_decode.geometry import decode_geometry
from kimi_kernels.mla_decode.kernel_hopper_launch import _takes_pairs


def takes_pairs(num_heads: int, max_query_len: int, split_tokens: int) -> bool:
    geometry = decode_geometry(
        num_heads=num_heads,
        block_size=64,
        num_seqs=2,
        max_query_len=max_query_len,
        max_seq_len=1000,
        split_tokens=split_tokens,
        num_processors=132,
    )
    return _takes_pairs(geometry)


@pytest.mark.parametrize(
    ("num_heads", "max_query_len", "expected"),
    [(8, 8, False), (8, 9, True), (16, 4, False), (16, 5, True), (64, 1, True), (64, 4, True), (48, 1, False)],
)
def test_rows_that_the_products_bind_go_in_pairs(num_heads: int, max_query_len: int, expected: bool) -> None:
    assert takes_pairs(num_heads, max_query_len, 0) == expected


@pytest.mark.parametrize(
    ("num_seqs", "num_heads", "max_query_len", "split_tokens", "expected"),
    [
        (1, 16, 4, 0, 32),
        (1, 8, 5, 0, 32),
        (1, 64, 1, 0, 32),
        (1, 16, 5, 0, 64),
        (2, 16, 4, 0, 64),
        (1, 64, 1, 64, 64),
        (1, 8, 2, 0, 16),
    ],
)
def test_one_sequence_goes_to_more_blocks(
    num_seqs: int, num_heads: int, max_query_len: int, split_tokens: int, expected: int
) -> None:
    geometry = decode_geometry(
        num_heads=num_heads,
        block_size=64,
        num_seqs=num_seqs,
        max_query_len=max_query_len,
        max_seq_len=1000,
        split_tokens=split_tokens,
        num_processors=132,
    )
    assert geometry.tile_rows == expected


@pytest.mark.parametrize(("num_heads", "expected"), [(8, False), (16, False), (48, False), (64, True), (128, True)])
def test_with_fixed_splits_the_heads_alone_decide(num_heads: int, expected: bool) -> None:
    assert {takes_pairs(num_heads, rows, 256) for rows in range(1, 9)} == {expected}
