"""The number of tiles that a launch must be ready for."""

import random

import pytest

from kimi_kernels.moe_experts.launch import HopperShapes, few_launch, max_tiles, sorted_launch


def test_max_tiles_is_reached_and_never_passed() -> None:
    random.seed(0)
    for _ in range(300):
        num_experts, columns = random.randint(1, 12), random.choice([8, 16, 64])
        counts = [random.choice([0, 1, columns - 1, columns, columns + 1, 5 * columns]) for _ in range(num_experts)]
        tiles = sum(-(-count // columns) for count in counts)
        assert tiles <= max_tiles(sum(counts), num_experts, columns)
    # Worst case: whole tiles and one assignment more in each expert.
    assert max_tiles(4 * 17, 4, 16) == 8 == 4 * 2


def test_max_tiles_with_fewer_assignments_than_experts() -> None:
    assert max_tiles(3, 384, 8) == 3


def test_tiles_by_the_mean_that_was_measured() -> None:
    """384 experts, 8 a token, of 2,048 columns and of a rank's 256."""
    tokens = (64, 192, 256, 320, 512, 576, 768, 1024, 2048)
    found = [
        [sorted_launch(8 * count, 384, down_steps, hopper_shapes(down_steps)) for count in tokens]
        for down_steps in (16, 2)
    ]
    assert [launch.columns for launch in found[0]] == [8, 8, 16, 16, 16, 16, 32, 32, 64]
    assert [launch.columns for launch in found[1]] == [8, 8, 8, 8, 32, 32, 32, 32, 64]
    assert {(launch.columns, launch.stages) for launch in (*found[0], *found[1])} == {(8, 4), (16, 4), (32, 3), (64, 3)}


@pytest.mark.parametrize(
    ("persistent", "down_tall", "columns", "tall_rows"),
    [(True, True, 192, 0), (False, True, 128, 256), (False, False, 64, 0)],
)
def test_tiles_beyond_the_means_that_were_measured(
    persistent: bool, down_tall: bool, columns: int, tall_rows: int
) -> None:
    shapes = HopperShapes(gate_up_tall=True, down_tall=down_tall, persistent=persistent)
    launch = sorted_launch(65 * 384, 384, 16, shapes)
    assert (launch.columns, launch.down_tall_rows, launch.scale_weights) == (columns, tall_rows, True)
    assert launch.gate_up_tall_rows == (tall_rows if down_tall else 128)
    assert launch.stages == 3


def hopper_shapes(down_steps: int) -> HopperShapes:
    return HopperShapes(gate_up_tall=True, down_tall=down_steps % 4 == 0, persistent=True)


@pytest.mark.parametrize("down_steps", [16, 2])
def test_the_persistent_kernel_from_a_mean_of_more_than_64(down_steps: int) -> None:
    most = 64 * 384
    before, after = (sorted_launch(count, 384, down_steps, hopper_shapes(down_steps)) for count in (most, most + 1))
    assert (before.columns, before.is_persistent) == (64, False)
    assert (after.columns, after.is_persistent) == (192, True)
    assert (after.gate_up_tall_rows, after.down_tall_rows) == (0, 0)
    plain = sorted_launch(most + 1, 384, down_steps, HopperShapes())
    assert (plain.columns, plain.gate_up_tall_rows, plain.is_persistent) == (64, 0, False)


def test_few_tokens_take_as_many_programs_as_keep_the_memory_busy() -> None:
    """A rank of eight has 4 row tiles of the first product in 56 steps, 56 row tiles of the second."""
    found = [few_launch(8 * tokens, 4, 56, 56) for tokens in (1, 2, 4, 8)]
    assert [launch.splits for launch in found] == [8, 4, 2, 1]
    assert [launch.down_tiles_a_group for launch in found] == [2, 4, 7, 7]
