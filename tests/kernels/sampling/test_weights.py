"""Integer weights and the rules that the filters keep, on cases small enough to do by hand."""

import pytest
import torch

from kimi_kernels.sampling.weights import FilterParams, surviving_tokens, token_weights


def kept(y: list[float], top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> list[int]:
    filters = FilterParams(
        top_k=torch.tensor([[top_k]]),
        top_p=torch.tensor([[top_p]], dtype=torch.float32).double(),
        min_p=torch.tensor([[min_p]], dtype=torch.float32).double(),
    )
    return surviving_tokens(torch.tensor([y]), filters)[0].nonzero().flatten().tolist()


def test_best_weighs_one_and_the_rest_are_close() -> None:
    below = -torch.linspace(0, 27, 100_001)
    weights = token_weights(torch.cat((torch.tensor([0.0]), below))[None])[0, 1:]
    exact = below.double().exp() * 2**31
    assert weights[0] == 2**31
    assert ((weights.double() - exact).abs() <= 1 + exact * (2e-7 - below.double() * 2e-7)).all()
    assert (weights <= 2**31).all()


def test_no_token_outweighs_the_best() -> None:
    """The polynomial at a fraction that rounded up to 1 must stay below 2."""
    tiny = -(2.0 ** -torch.arange(1, 140, dtype=torch.float32))
    weights = token_weights(torch.cat((torch.tensor([0.0]), tiny))[None])[0]
    assert weights.max() == 2**31
    assert weights.min() > 2**30


def test_far_below_weighs_nothing() -> None:
    assert token_weights(torch.tensor([[5.0, 5.0 - 23.0, -1e30, float("-inf")]]))[0].tolist() == [2**31, 0, 0, 0]


def test_top_k_keeps_exactly_k_lowest_ids_first() -> None:
    assert kept([1.0, 3.0, 2.0, 2.0, 2.0], top_k=2) == [1, 2]
    assert kept([1.0, 3.0, 2.0, 2.0, 2.0], top_k=3) == [1, 2, 3]
    assert kept([2.0] * 5, top_k=4) == [0, 1, 2, 3]
    assert kept([2.0] * 5, top_k=0) == [0, 1, 2, 3, 4]
    assert kept([2.0, float("-inf"), 1.0], top_k=3) == [0, 2]


def test_top_p_keeps_equals_together() -> None:
    assert kept([0.0, 0.0, 0.0, -50.0], top_p=0.4) == [0, 1, 2]
    assert kept([0.0, -0.7, -0.7, -2.0], top_p=0.5) == [0, 1, 2]


def test_top_p_stops_where_the_mass_above_reaches_it() -> None:
    # Weights 4 : 2 : 1 : 1 of 8. Mass above: 0, 4, 6, 6.
    two = [0.0, -0.6931472, -1.3862944, -1.3862944]
    assert kept(two, top_p=0.49) == [0]
    assert kept(two, top_p=0.51) == [0, 1]
    assert kept(two, top_p=0.74) == [0, 1]
    assert kept(two, top_p=0.76) == [0, 1, 2, 3]
    assert kept(two, top_p=0.0) == [0]


def test_top_p_renormalises_after_top_k() -> None:
    # Of the two kept by top-k the best holds 2/3; of all four it holds 1/2.
    two = [0.0, -0.6931472, -1.3862944, -1.3862944]
    assert kept(two, top_p=0.6) == [0, 1]
    assert kept(two, top_k=2, top_p=0.6) == [0]


def test_min_p_comes_first() -> None:
    two = [0.0, -0.6931472, -1.3862944, -1.3862944]
    assert kept(two, min_p=0.3) == [0, 1]
    assert kept(two, min_p=0.3, top_p=0.6) == [0]
    assert kept(two, min_p=1.0) == [0]
    assert kept(two, min_p=0.3, top_k=3) == [0, 1]


@pytest.mark.parametrize("top_p", [0.1, 0.5, 0.9, 0.999])
def test_top_p_is_the_smallest_such_set_in_float64(top_p: float) -> None:
    generator = torch.Generator().manual_seed(3)
    y = torch.randn(2000, generator=generator) * 2
    probabilities, order = y.double().softmax(0).sort(descending=True)
    size = int((probabilities.cumsum(0) < top_p).sum()) + 1
    assert kept(y.tolist(), top_p=top_p) == sorted(order[:size].tolist())
