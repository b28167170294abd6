"""`kimi demo` over completions that a test makes up: what it asks for, measures and says."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kimi_backend.cli import demo
from kimi_backend.cli.comparison import Comparison
from kimi_backend.cli.demo import DemoRun, find_checkpoint, run_demo
from kimi_backend.config.settings import ServingSettings
from kimi_backend.errors import KimiError
from kimi_backend.types.request import FinishReason, RequestStats, SpeculationStats, TokenDelta
from support.printed_tables import rows_of

SPECULATION = {"mean_acceptance_length": 2.25, "acceptance_per_position": [0.75, 0.5, None]}
STATS = RequestStats(
    num_prompt_tokens=3,
    num_cached_tokens=0,
    num_output_tokens=6,
    max_tokens=6,
    queue_time_s=0.0,
    first_token_time_s=0.1,
    total_time_s=0.5,
    num_preemptions=0,
    seed=1,
    speculation=SpeculationStats(num_spec_steps=2, num_draft_tokens=6, num_accepted_draft_tokens=3),
    num_draft_tokens_histogram=(0, 0, 0, 2),
)


class Completions:
    """Generates at a rate of each side, and keeps what it was asked for."""

    def __init__(self, rates: dict[int, float], texts: Callable[[int], str]) -> None:
        self.asked: list[tuple[Any, ...]] = []
        self.settings: ServingSettings | None = None
        self._rates, self._texts = rates, texts

    @contextmanager
    def open(self, settings: ServingSettings) -> Iterator[demo.Generate]:
        self.settings = settings
        yield self.generate

    def generate(self, prompt: str, max_tokens: int, k: int, temperature: float, show: demo.Show) -> DemoRun:
        self.asked.append((prompt, max_tokens, k, temperature, show is not None))
        return DemoRun(self._texts(k), self._rates[k], SPECULATION if k else None, [1, 0, 0, 3] if k else [4])


def run(monkeypatch: pytest.MonkeyPatch, made: Completions, **options: Any) -> int:
    monkeypatch.setattr(demo, "through_server", made.open)
    monkeypatch.setattr(demo, "in_process", lambda settings: pytest.fail("a server was asked for"))
    given = {"prompt": "def", "max_tokens": 8, "num_speculative_tokens": 3, "temperature": 0.5, "is_in_process": False}
    return run_demo(**{**given, **options})


def test_both_sides_are_shown_measured_and_compared(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made = Completions({3: 200.0, 0: 100.0}, lambda k: "same")
    assert run(monkeypatch, made) == 0
    assert [(k, is_shown) for *_, k, _, is_shown in made.asked[:8]] == [
        (3, False), (0, False), (3, True), (0, True), (3, False), (0, False), (0, False), (3, False),
    ]  # fmt: skip
    assert {(prompt, limit, temperature) for prompt, limit, _, temperature, _ in made.asked} == {("def", 8, 0.5)}
    assert made.settings is not None
    assert (made.settings.speculation_policy, made.settings.num_speculative_tokens) == ("fixed", 3)
    out, said = capsys.readouterr()
    told = json.loads(out.splitlines()[-1])
    assert (told["texts_equal"], told["verdict"], told["pairs"], told["acceptance_length"]) == (True, "faster", 8, 2.25)
    assert out.startswith("def\ndef\n")
    rows = rows_of(said)
    assert rows["tokens/s, median"] == ["200.0", "100.0"]
    assert rows["interval"] == ["200.0 to 200.0", "100.0 to 100.0"]
    assert rows["acceptance length"] == ["2.25", "1.00"]
    assert [rows[f"accepted at position {n}"] for n in (1, 2, 3)] == [["75%", ""], ["50%", ""], ["-", ""]]
    assert rows["verifies with k = 0, 1, …"] == ["25%, 0%, 0%, 75%", "100%"]
    assert "texts are equal" in said and said.count("guessed by the draft") == 1 and "cyan" not in said
    assert "random" not in said and "leaves the draft" not in said


def test_other_texts_are_a_failure(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    made = Completions({3: 50.0, 0: 100.0}, str)
    assert run(monkeypatch, made, proposer="lookup+eagle3") == 1
    out, said = capsys.readouterr()
    assert json.loads(out.splitlines()[-1])["texts_equal"] is False
    assert "texts are DIFFERENT" in said and said.count("cyan") == 1
    assert "leaves the draft" in said


def test_without_a_trained_checkpoint_it_says_that_this_one_is_random(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(demo, "find_checkpoint", lambda folder: (tmp_path, True))
    made = Completions({3: 1.0, 0: 1.0}, lambda k: "same")
    assert run(monkeypatch, made) == 0
    assert "this one is random" in capsys.readouterr().err
    assert made.settings is not None
    assert (made.settings.checkpoint, made.settings.draft) == (str(tmp_path), str(tmp_path / "draft"))


def test_the_checkpoint_that_ships_is_taken_or_one_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained, is_random = find_checkpoint(tmp_path)
    assert (trained.name, is_random, list(tmp_path.iterdir())) == ("kimi-nano", False, [])
    monkeypatch.setattr("kimi_backend.__file__", str(tmp_path / "a" / "b" / "c.py"))
    monkeypatch.setattr("kimi_backend.cli.make_checkpoint.make_checkpoint", lambda out, **_: out.mkdir())
    assert find_checkpoint(tmp_path) == (tmp_path / "checkpoint", True)
    assert (tmp_path / "checkpoint").is_dir()


def test_a_report_of_nothing_accepted(capsys: pytest.CaptureFixture[str]) -> None:
    comparison = Comparison((1.0,), (1.0,))
    assert demo._report(DemoRun("", 1.0, None, []), comparison, is_equal=True) == 0
    out, said = capsys.readouterr()
    assert rows_of(said)["acceptance length"] == ["1.00", "1.00"]
    assert json.loads(out)["acceptance_length"] is None


class EngineOf:
    """An engine that answers each request with the same deltas."""

    def __init__(self, *deltas: TokenDelta) -> None:
        self.requests: list[Any] = []
        self._deltas = deltas

    def submit(self, request: Any, sink: Callable[[TokenDelta], None]) -> None:
        self.requests.append(request)
        for delta in self._deltas:
            sink(delta)


@contextmanager
def engine_in_process(monkeypatch: pytest.MonkeyPatch, engine: EngineOf) -> Iterator[demo.Generate]:
    @contextmanager
    def local_engine(settings: ServingSettings, tokenizer: Any) -> Iterator[EngineOf]:
        yield engine

    monkeypatch.setattr("kimi_backend.cli.local_engine.local_engine", local_engine)
    monkeypatch.setattr(
        "kimi_backend.text.tokenizer.load_tokenizer", lambda folder: SimpleNamespace(encode=lambda text: [len(text)])
    )
    with demo.in_process(ServingSettings(checkpoint="c")) as generate:
        yield generate


LAST = TokenDelta(request_id="r", token_ids=(3,), text="b", finish_reason=FinishReason.LENGTH, stats=STATS)


def test_a_request_in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, shown = EngineOf(TokenDelta(request_id="r", token_ids=(1, 2), text="a"), LAST), list[str]()
    show: Any = SimpleNamespace(show=lambda delta: shown.append(delta.text))
    with engine_in_process(monkeypatch, engine) as generate:
        done = generate("def", 6, 3, 0.5, show)
        generate("def", 6, 0, 0.5, None)
    assert (done.text, done.tokens_per_second, done.num_draft_tokens_histogram) == ("ab", 12.0, [0, 0, 0, 2])
    assert done.speculation is not None and done.speculation["mean_acceptance_length"] == 2.5
    assert shown == ["a", "b"]
    first, second = engine.requests
    assert (first.prompt_token_ids, first.num_speculative_tokens, first.return_token_origins) == ((3,), 3, True)
    assert (first.sampling.max_tokens, first.sampling.temperature, first.sampling.seed) == (6, 0.5, demo.SEED)
    assert (second.request_id != first.request_id, second.return_token_origins) == (True, False)


@pytest.mark.parametrize(
    ("last", "message"), [(replace(LAST, error="lost"), "lost"), (replace(LAST, stats=None), "gave no statistics")]
)
def test_a_request_in_process_that_fails(monkeypatch: pytest.MonkeyPatch, last: TokenDelta, message: str) -> None:
    with engine_in_process(monkeypatch, EngineOf(last)) as generate, pytest.raises(KimiError, match=message):
        generate("def", 6, 3, 0.5, None)
