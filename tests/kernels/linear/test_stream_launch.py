"""Sizes of the streaming product's launches, and which weights have one."""

import pytest
import torch

from kimi_kernels.linear.stream_launch import (
    HEAD_FEATURES,
    MOST_ROWS,
    MOST_ROWS_OF_HEADS,
    PROCESSORS,
    can_stream,
    new_arrivals,
    stream_launch,
    stream_splits,
)

SHARED_BYTES = 232_448
"""Most of a program on an H100; all programs of a multiprocessor share 1 KB less than 228."""


@pytest.mark.parametrize(
    ("out_features", "splits"), [(384, 4), (2112, 4), (4096, 2), (7168, 1), (12_288, 1), (36_864, 1), (163_840, 1)]
)
def test_splits_fill_the_card_once(out_features: int, splits: int) -> None:
    assert stream_splits(out_features) == splits
    most_rows = MOST_ROWS if out_features < HEAD_FEATURES else MOST_ROWS_OF_HEADS
    assert {stream_launch(rows, out_features).splits for rows in range(1, most_rows + 1)} == {splits}


@pytest.mark.parametrize("num_rows", [1, 8, 9, 16, 17, 33, 64])
@pytest.mark.parametrize("out_features", [1, 384, 2112, 7168, 8449, 163_840])
def test_rings_fit(num_rows: int, out_features: int) -> None:
    """One ring a multiprocessor, or two where there are more programs than multiprocessors."""
    launch = stream_launch(num_rows, out_features)
    assert num_rows <= launch.columns
    size = launch.stages * (launch.tile_rows + launch.columns) * launch.step * 2 + 1024
    programs = -(-out_features // launch.tile_rows) * launch.splits
    assert size <= SHARED_BYTES
    assert 2 * size <= SHARED_BYTES or programs <= PROCESSORS


def test_what_does_not_stream() -> None:
    weight = torch.zeros(2112, 1024, dtype=torch.bfloat16)
    assert new_arrivals(weight) == (), "not on Hopper"
    x = torch.zeros(40, 1032, dtype=torch.bfloat16)
    assert can_stream(x[:MOST_ROWS, :1024], weight)
    assert not can_stream(x[:0, :1024], weight)
    assert not can_stream(x[: MOST_ROWS + 1, :1024], weight)
    assert can_stream(x[: MOST_ROWS + 1, :1024], torch.empty(HEAD_FEATURES, 1024, dtype=torch.bfloat16))
    assert not can_stream(x[:4, 1:1025], weight), "not aligned to 16 bytes"
    assert not can_stream(x[:4, :1024].float(), weight), "another dtype"
    assert not can_stream(torch.zeros(1024, 4, dtype=torch.bfloat16).T, weight), "columns apart"
