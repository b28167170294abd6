"""`kimi probe` prints the setting to believe in the first row, how far it is below the best, and the verdict."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from kimi_backend.cli.main import app
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


class Opened:
    """Models on ranks: each setting was measured before."""

    def __init__(self, *results: ProbeResult) -> None:
        self.results = results
        self.candidates = [each.setting for each in results]
        self.config_aux = (2, 3, 4)
        self.asked: list[Any] = []

    def write_texts(self, prompts: list[tuple[int, ...]], num_tokens: int, advance: Callable[[], None]) -> list[str]:
        self.asked.append((prompts, num_tokens))
        for _ in prompts:
            advance()
        return ["text"]

    def run(self, texts: list[str], num_draft_tokens: int) -> Iterator[ProbeResult]:
        self.asked.append((texts, num_draft_tokens))
        yield from self.results


OWN = result("own", [1.2, 1.3, 1.1, 1.2, 1.25])
BETTER = result("better", [2.2, 2.4, 2.0, 2.3, 2.2], DraftOverrides(interleaved=False))


@pytest.mark.parametrize(("results", "code"), [([OWN], 0), ([OWN, BETTER], 1)])
def test_the_command_measures_every_setting_and_ends_with_the_verdict(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, results: list[ProbeResult], code: int
) -> None:
    opened, jobs = Opened(*results), list[Any]()

    @contextmanager
    def opened_on_ranks(job: Any) -> Iterator[Opened]:
        jobs.append(job)
        yield opened

    monkeypatch.setattr("kimi_backend.probe.ranks.opened_on_ranks", opened_on_ranks)
    monkeypatch.setattr(
        "kimi_backend.text.tokenizer.load_tokenizer", lambda folder: SimpleNamespace(encode=lambda text: [len(text)])
    )
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "abc"}\n{"input_ids": [5, 6]}\n')
    options = ["probe", "/t", "--draft=/d", f"--prompts={prompts}", "--num-tokens=9", "-k", "2", "-tp", "2"]
    done = CliRunner().invoke(app, [*options, "--json"], catch_exceptions=False)
    assert done.exit_code == code
    told = json.loads(done.stdout)
    assert (told["file_is_right"], told["file"]["aux_layer_ids"]) == (code == 0, [2, 3, 4])
    assert len(told["settings"]) == len(results)
    assert opened.asked == [([(3,), (5, 6)], 9), (["text"], 2)]
    (job,) = jobs
    assert (job.prompts, job.num_tokens, job.num_draft_tokens) == (((3,), (5, 6)), 9, 2)
    assert (job.settings.checkpoint, job.settings.draft, job.settings.tensor_parallel_size) == ("/t", "/d", 2)
    shown = CliRunner().invoke(app, options, catch_exceptions=False)
    assert (shown.exit_code, shown.stdout.splitlines()[0]) == (code, "accepted  below best  setting")


def test_a_row_says_what_was_accepted_and_how_far_below_the_best() -> None:
    lines = _text(report([OWN, BETTER])).splitlines()
    assert lines[1].split()[:4] == ["2.220", "0.0", "SE", "aux"]
    assert lines[2].split()[0] == "1.210" and float(lines[2].split()[1]) > 3
