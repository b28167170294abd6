import pytest

from kimi_backend.spec_decode.controller import SpeculationController


@pytest.mark.parametrize(
    ("k", "remaining", "wanted"), [(3, 100, 3), (3, 4, 3), (3, 3, 2), (3, 2, 1), (3, 1, 0), (3, 0, 0), (0, 100, 0)]
)
def test_no_more_is_drafted_than_can_be_used(k: int, remaining: int, wanted: int) -> None:
    assert SpeculationController(k).num_draft_tokens(remaining) == wanted
