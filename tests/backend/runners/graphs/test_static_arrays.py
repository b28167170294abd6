import numpy as np
import pytest
import torch

from kimi_backend.runners.graphs.static_arrays import (
    Arena,
    ArrayLayout,
    StaticArrays,
    StaticBlockTable,
    StaticResults,
)

CPU = torch.device("cpu")
SPECS = {"odd": ((3,), np.int32), "wide": ((2, 2), np.int64), "empty": ((2, 0), np.int32), "real": ((3,), np.float32)}


def test_every_array_arrives_by_its_name() -> None:
    layout = ArrayLayout.of(SPECS)
    arrays = StaticArrays(layout, Arena([layout], CPU))
    arrays.host["odd"][:] = [1, -2, 3]
    arrays.host["wide"][:] = [[2**40, 1], [2, -(2**40)]]
    arrays.host["real"][:] = [0.5, -1.5, 2.0]
    assert arrays.device["odd"].tolist() == [0, 0, 0]
    arrays.upload()
    assert arrays.device["odd"].tolist() == [1, -2, 3]
    assert arrays.device["wide"].tolist() == [[2**40, 1], [2, -(2**40)]]
    assert arrays.device["real"].tolist() == [0.5, -1.5, 2.0]
    assert arrays.device["empty"].shape == (2, 0)


def test_layouts_share_an_arena_and_keep_their_addresses() -> None:
    small, large = ArrayLayout.of({"a": ((2,), np.int64)}), ArrayLayout.of(SPECS)
    arena = Arena([small, large], CPU)
    first, second = StaticArrays(small, arena), StaticArrays(large, arena)
    address = first.device["a"].data_ptr()
    first.host["a"][:] = [7, 8]
    first.upload()
    assert first.device["a"].tolist() == [7, 8]
    second.host["odd"][:] = 1
    second.upload()
    assert first.device["a"].data_ptr() == address
    assert first.device["a"].tolist() != [7, 8]


def test_one_copy_takes_arrays_of_two_layouts_whatever_their_sizes() -> None:
    befores, layouts = ([ArrayLayout.of({"a": ((size,), np.int64)}) for size in sizes] for sizes in ((3, 70), (2, 9)))
    arena = Arena(layouts, CPU, before=befores)
    for before_layout in befores:
        for layout in layouts:
            before, arrays = StaticArrays(before_layout, arena, is_before=True), StaticArrays(layout, arena)
            before.host["a"][:], arrays.host["a"][:] = 5, 6
            arena.device.zero_()
            arrays.upload(before=before)
            assert bool((before.device["a"] == 5).all()) and bool((arrays.device["a"] == 6).all())
            assert arena.device.count_nonzero() == len(before.host["a"]) + len(arrays.host["a"])


def test_the_block_table_keeps_its_stride() -> None:
    table = StaticBlockTable(4, 8, CPU)
    address = table.tensor.data_ptr()
    blocks = np.arange(15, dtype=np.int32).reshape(3, 5)
    table.upload(blocks, 2)
    assert table.tensor[:3, :2].tolist() == blocks[:, :2].tolist()
    assert table.tensor[:3, 2:].sum() == 0
    assert (table.tensor.data_ptr(), table.tensor.stride()) == (address, (8, 1))


@pytest.mark.parametrize("change", [(0, 0), (2, 1)])
def test_a_changed_block_is_sent(change: tuple[int, int]) -> None:
    table = StaticBlockTable(4, 8, CPU)
    blocks = np.arange(6, dtype=np.int32).reshape(3, 2)
    table.upload(blocks, 2)
    blocks[change] = 77
    table.upload(blocks, 2)
    assert table.tensor[:3, :2].tolist() == blocks.tolist()
    # The same numbers in another shape are another table.
    table.upload(blocks.reshape(2, 3), 3)
    assert table.tensor[:2, :3].tolist() == blocks.reshape(2, 3).tolist()


def test_results_come_back_as_they_were_stored() -> None:
    results = StaticResults(20, CPU)
    wide, narrow = torch.tensor([[2**40, -1], [3, 4]]), torch.tensor([5, -6], dtype=torch.int32)
    results.store([wide, narrow])
    words = results.fetch(10)
    assert words[:8].view(np.int64).reshape(2, 2).tolist() == wide.tolist()
    assert words[8:].tolist() == [5, -6]
    results.store([narrow])
    assert words[:2].tolist() != [5, -6], "a copy, which the next step does not change"


def test_results_of_two_steps_are_on_their_way_at_once() -> None:
    results = StaticResults(4, CPU)
    arriving = []
    for value in (3, 4):
        results.store([torch.full((4,), value, dtype=torch.int32)])
        arriving.append(results.send(4))
    assert [words.wait().tolist() for words in arriving] == [[3] * 4, [4] * 4]
