import pytest

from kimi_backend.spec_decode.controller import SpeculationController


@pytest.mark.parametrize(
    ("temperature", "kind"), [(0.0, 0), (0.9e-5, 0), (1e-5, 1), (0.3, 1), (0.7, 1), (0.71, 2), (1.5, 2)]
)
def test_requests_of_a_kind_are_greedy_cool_or_warm(temperature: float, kind: int) -> None:
    assert SpeculationController(3, temperature).kind == kind


@pytest.mark.parametrize(
    ("k", "remaining", "wanted"), [(3, 100, 3), (3, 4, 3), (3, 3, 2), (3, 2, 1), (3, 1, 0), (3, 0, 0), (0, 100, 0)]
)
def test_no_more_is_drafted_than_can_be_used(k: int, remaining: int, wanted: int) -> None:
    assert SpeculationController(k).num_draft_tokens(remaining) == wanted
