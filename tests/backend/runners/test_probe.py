"""The probe's settings and its verdict. That it replays serving is tested on trained models, in tests/demo."""

import pytest

from kimi_backend.config.draft_config import DraftOverrides, Eagle3DraftConfig
from kimi_backend.config.model_config import KimiModelConfig
from kimi_backend.probe.probing import ProbeResult, ranking, verdict
from kimi_backend.probe.settings import ProbeSetting, candidate_settings, layers_to_keep
from kimi_nano.recipe import MICRO, DraftKind


def config_of(kind: DraftKind) -> Eagle3DraftConfig:
    target = KimiModelConfig.from_hf_json(MICRO.target_json())
    return Eagle3DraftConfig.from_hf_json(MICRO.draft_json(kind), target)


def result(
    name: str, lengths: list[float], *, is_files_own: bool = False, overrides: DraftOverrides | None = None
) -> ProbeResult:
    changes = DraftOverrides() if is_files_own else overrides or DraftOverrides(fc_norm=True)
    setting = ProbeSetting(aux=name, rope="", norms="", overrides=changes, is_files_own=is_files_own)
    return ProbeResult(setting=setting, lengths=tuple(lengths))


@pytest.mark.parametrize(("kind", "has_fc_norm", "norms"), [(DraftKind.MLA, False, 2), (DraftKind.MLA31, True, 4)])
def test_every_reading_meets_every_rope_and_norm(kind: DraftKind, has_fc_norm: bool, norms: int) -> None:
    config = config_of(kind)
    settings = candidate_settings(config, 8, has_fc_norm)
    assert settings[0].is_files_own
    assert settings[0].overrides == DraftOverrides()
    assert sum(setting.is_files_own for setting in settings) == 1
    # Three readings of the ids; as the file, other pairs, two thetas, one beta_fast.
    assert len(settings) == 3 * 5 * norms
    assert len({setting.overrides for setting in settings}) == len(settings)
    assert layers_to_keep(settings, config) == (1, 2, 3, 4, 5, 6)


def test_a_clearly_better_setting_is_believed() -> None:
    own = result("own", [1.2, 1.3, 1.1, 1.2, 1.25], is_files_own=True)
    better = result("better", [2.2, 2.4, 2.0, 2.3, 2.2])
    assert verdict([own, better]) == (better, [])


def test_the_files_setting_is_believed_among_near_equals() -> None:
    own = result("own", [2.0, 2.4, 1.9, 2.2], is_files_own=True)
    near = result("near", [2.1, 2.3, 2.0, 2.25])
    assert verdict([near, own]) == (own, [near])


def test_the_least_change_is_believed_among_near_equals() -> None:
    own = result("own", [1.2, 1.3, 1.1, 1.2], is_files_own=True)
    least = result("least", [2.0, 2.4, 1.9, 2.2], overrides=DraftOverrides(norm_output=True))
    more = result("more", [2.1, 2.3, 2.0, 2.25], overrides=DraftOverrides(norm_output=True, interleaved=False))
    assert verdict([own, more, least]) == (least, [more])


def test_near_equals_rank_by_how_little_they_change_and_what_is_clearly_worse_by_acceptance() -> None:
    own = result("own", [2.0, 2.4, 1.9, 2.2], is_files_own=True)
    best = result("best", [2.1, 2.3, 2.0, 2.25], overrides=DraftOverrides(norm_output=True, interleaved=False))
    near = result("near", [2.0, 2.4, 1.9, 2.1])
    worse, worst = result("worse", [1.6, 1.7, 1.5, 1.6]), result("worst", [1.0, 1.1, 1.0, 1.1])
    assert ranking([worst, best, near, worse, own]) == [own, near, best, worse, worst]
    assert verdict([worst, best, near, worse, own]) == (own, [near, best])


def test_equal_settings_are_not_told_apart() -> None:
    own, same = result("own", [1.5, 1.7], is_files_own=True), result("same", [1.5, 1.7])
    assert own.errors_above(same) == 0
    assert verdict([own, same]) == (own, [same])
