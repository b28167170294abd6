"""Ranks must divide every dimension that is divided, of both models."""

import pytest

from kimi_backend.errors import ConfigError
from kimi_backend.runners.ranks.divisible import check_divides
from support.tiny_configs import draft_config, target_config

TARGET = target_config()
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}


def test_what_does_not_divide_is_listed_with_what_would() -> None:
    draft = draft_config("mha", TARGET, **HEADS)
    check_divides(2, TARGET, draft)
    check_divides(4, TARGET, None)
    with pytest.raises(
        ConfigError, match=r"4 given, which does not divide the draft's num_key_value_heads 2; 1, 2 would$"
    ):
        check_divides(4, TARGET, draft)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"num_attention_heads": 3}, "the draft's num_attention_heads 3"),
        ({"intermediate_size": 97}, "the draft's intermediate_size 97"),
        ({"draft_vocab_size": 95}, "the draft's draft_vocab_size 95"),
    ],
)
def test_each_dimension_of_a_draft_counts(fields: dict[str, int], named: str) -> None:
    with pytest.raises(ConfigError, match=f"2 given, which does not divide {named}; 1 would"):
        check_divides(2, TARGET, draft_config("mla", TARGET, **fields))


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"num_attention_heads": 3}, "num_attention_heads 3"),
        ({"vocab_size": 95}, "vocab_size 95"),
        ({"moe_intermediate_size": 33}, "moe_intermediate_size 33"),
        ({"intermediate_size": 97}, "intermediate_size 97"),
    ],
)
def test_each_dimension_of_a_target_counts(fields: dict[str, int], named: str) -> None:
    with pytest.raises(ConfigError, match=f"2 given, which does not divide {named}; 1 would"):
        check_divides(2, target_config(**fields), None)
