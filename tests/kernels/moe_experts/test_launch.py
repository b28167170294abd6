"""The number of tiles that a launch must be ready for."""

import random

from kimi_kernels.moe_experts.launch import max_tiles


def test_max_tiles_is_reached_and_never_passed() -> None:
    random.seed(0)
    for _ in range(300):
        num_experts, columns = random.randint(1, 12), random.choice([8, 16, 64])
        counts = [random.choice([0, 1, columns - 1, columns, columns + 1, 5 * columns]) for _ in range(num_experts)]
        tiles = sum(-(-count // columns) for count in counts)
        assert tiles <= max_tiles(sum(counts), num_experts, columns)
    # Worst case: whole tiles and one choice more in each expert.
    assert max_tiles(4 * 17, 4, 16) == 8 == 4 * 2


def test_max_tiles_with_fewer_choices_than_experts() -> None:
    assert max_tiles(3, 384, 8) == 3
