"""The CPU kernel set's rotation: the reference's bits; a step's angles are kept."""

import pytest
import torch

from kimi_kernels.rope import reference
from kimi_kernels.rope.cpu import rope


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize(("num_heads", "width"), [(1, 16), (8, 64), (3, 10), (2, 2)])
def test_it_equals_the_reference_bit_for_bit(num_heads: int, width: int, interleaved: bool) -> None:
    torch.manual_seed(width)
    cos_sin = torch.randn(50, width)
    for num_tokens in (0, 1, 3, 70):
        for _ in range(2):
            positions = torch.randint(50, (num_tokens,))
            x = torch.randn(num_tokens, num_heads, width + 6)[..., 2 : 2 + width]
            got = rope(x, cos_sin, positions, interleaved)
            assert torch.equal(got, reference.rope(x, cos_sin, positions, interleaved)), num_tokens


def test_another_table_of_the_same_shape_gives_other_angles() -> None:
    x, positions = torch.randn(2, 1, 8), torch.tensor([0, 3])
    tables = torch.randn(2, 5, 8).unbind()
    for table in (*tables, *tables):
        assert torch.equal(rope(x, table, positions, True), reference.rope(x, table, positions, True))


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="positions: got shape"):
        rope(torch.randn(2, 1, 8), torch.randn(5, 8), torch.tensor([0]), True)
    with pytest.raises(ValueError, match="cos_sin: got shape"):
        rope(torch.randn(2, 1, 8), torch.randn(5, 6), torch.tensor([0, 1]), True)
