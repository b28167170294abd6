"""A recipe's values stand in the config.json of its models."""

import pytest

from kimi_backend.checkpoint.presets import DraftKind
from kimi_nano.recipe import RECIPES, Recipe


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES.keys())
def test_target_and_drafts_have_the_recipes_positions(recipe: Recipe) -> None:
    text = recipe.target_json()["text_config"]
    assert recipe.text.items() <= text.items() and recipe.yarn.items() <= text["rope_scaling"].items()
    for kind in DraftKind:
        assert recipe.yarn.items() <= recipe.draft_json(kind)["rope_scaling"].items()
