"""`kimi probe` prints the setting to believe in the first row, how far it is below the best, and the verdict."""

from kimi_backend.cli.probe import SHOWN_ROWS, _report, _text
from kimi_backend.config.draft_config import DraftOverrides
from kimi_backend.probe.probing import ProbeResult, ranking, verdict
from kimi_backend.probe.settings import ProbeSetting


def result(name: str, lengths: list[float], overrides: DraftOverrides | None = None) -> ProbeResult:
    changes = overrides or DraftOverrides()
    own = overrides is None
    setting = ProbeSetting(aux=name, rope="file", norms="file", overrides=changes, is_files_own=own)
    return ProbeResult(setting=setting, lengths=tuple(lengths))


def report(results: list[ProbeResult]) -> dict:
    return _report(ranking(results), verdict(results)[1], (2, 3, 4))


def test_near_equals_begin_with_the_file() -> None:
    own = result("own", [2.0, 2.4, 1.9, 2.2])
    near = result("near", [2.1, 2.3, 2.0, 2.25], DraftOverrides(norm_output=True))
    found = report([near, own])
    assert [row["setting"].split(";")[0] for row in found["settings"]] == ["aux own", "aux near"]
    assert found["trained_with"] == found["settings"][0]
    assert found["file_is_right"]
    assert 0 < found["settings"][0]["standard_errors_below_best"] < 3
    lines = _text(found).splitlines()
    assert lines[1].endswith("aux own; rope file; file")
    assert "the first 2" in lines[3]
    assert lines[-1].startswith("Nothing is clearly better")


def test_a_clearly_better_setting_begins_and_the_rest_is_counted() -> None:
    own = result("own", [1.2, 1.3, 1.1, 1.2, 1.25])
    better = result("better", [2.2, 2.4, 2.0, 2.3, 2.2], DraftOverrides(interleaved=False))
    others = [
        result(f"{n}", [1.0, 1.0, 1.01, 1.0, 1.0], DraftOverrides(rope_theta=n)) for n in range(2, SHOWN_ROWS + 1)
    ]
    found = report([own, *others, better])
    assert not found["file_is_right"]
    lines = _text(found).splitlines()
    assert lines[1].endswith("aux better; rope file; file")
    assert lines[2].endswith("aux own; rope file; file")
    assert lines[SHOWN_ROWS + 1] == "... and 1 more"
    assert lines[-1].endswith('{"interleaved": false}')
