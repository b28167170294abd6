"""The figures that a report gives of texts and drafts, for texts small enough to count by hand."""

import gzip
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kimi_backend.checkpoint.presets import DraftKind
from kimi_nano import evaluate, plot, sharpen
from kimi_nano.acceptance import Acceptance, Trajectories, _chance, _walk, drop_in_errors, record
from kimi_nano.text_measures import ends_in_loop, gzip_nats_per_byte, lookup_acceptance, lookup_draft


def counted(*rows: list[float]) -> Acceptance:
    return Acceptance(torch.tensor(rows, dtype=torch.float64))


@pytest.mark.parametrize(
    ("ids", "loops"),
    [
        ([1, 2, 3] * 8, True),
        ([9, *[1, 2, 3] * 8], True),
        ([1, 2, 3] * 7, False),
        ([5] * 24, True),
        ([9, *[5] * 23], False),
        ([5] * 24 + [9], False),
        (list(range(10)) * 3, True),
        ([*range(1, 10), *list(range(10)) * 2], False),
        ([], False),
    ],
)
def test_a_text_loops_when_its_end_stands_there_three_times_over_24_tokens(ids: list[int], loops: bool) -> None:
    assert ends_in_loop(ids) is loops


def test_gzip_compresses_each_text_and_all_in_one_stream() -> None:
    texts = [b"ab" * 50, b"cd" * 70]
    alone = sum(len(gzip.compress(text, 9, mtime=0)) for text in texts)
    together = len(gzip.compress(texts[0] + texts[1], 9, mtime=0))
    assert alone > together
    bits = [nats * 240 / math.log(2) for nats in gzip_nats_per_byte(texts)]
    assert bits == pytest.approx([8 * alone, 8 * together])


@pytest.mark.parametrize(
    ("context", "guesses"),
    [
        ([1, 2, 3, 9, 1, 2, 3], [9, 1]),
        ([1, 7, 1, 8, 1], [8, 1]),
        ([2, 3, 7, 8, 3, 6, 2, 3], [7, 8]),
        ([1, 2, 3, 4, 5, 60, 0, 2, 3, 4, 5, 61, 1, 2, 3, 4, 5], [61, 1]),
        ([4, 4], [4]),
        ([1, 2, 3], []),
        ([5], []),
    ],
)
def test_lookup_copies_what_followed_the_last_longest_match(context: list[int], guesses: list[int]) -> None:
    assert lookup_draft(context, 2) == guesses


def test_lookups_rounds_follow_one_another() -> None:
    written = torch.tensor([[2, 3, 4, 1, 7, 7], [11, 12, 13, 14, 15, 16]])
    reached = lookup_acceptance([[1, 2, 3, 4, 1], [10]], written, 2).reached
    assert reached.tolist() == [[2, 1, 1], [4, 0, 0]]


def test_the_figures_of_acceptance() -> None:
    acceptance = counted([4, 2, 0], [2, 2, 1])
    assert acceptance.length == pytest.approx(1 + 5 / 6)
    assert acceptance.lengths.tolist() == [1.5, 2.5]
    assert acceptance.standard_error == pytest.approx(0.5)
    assert acceptance.per_position == pytest.approx([4 / 6, 1 / 6])
    assert acceptance.of(torch.tensor([False, True])).reached.tolist() == [[2, 2, 1]]
    assert drop_in_errors(acceptance, counted([4, 0, 0], [2, 0, 0])) == pytest.approx(2.0)


def test_a_round_begins_where_the_one_before_it_ended() -> None:
    chances = torch.zeros(2, 7, 2)
    chances[0, 0], chances[0, 3], chances[0, 4] = torch.ones(2), torch.tensor([0.0, 1.0]), torch.tensor([1.0, 0.0])
    reached = _walk(chances, trajectories(), slice(0, 2))
    assert reached.tolist() == [[3, 2, 1], [5, 0, 0]]


def trajectories() -> Trajectories:
    none = torch.empty(0)
    return Trajectories(none.long(), none, 7, 2.0, torch.arange(4), {}, none)


def test_the_chance_of_a_token_under_the_classic_rule_and_greedily() -> None:
    """The draft keeps tokens 0 and 2 of three; token 1 has no chance."""
    of_draft, of_target = torch.tensor([0.0, 2.0]).expand(1, 3, 2), torch.tensor([0.0, 1.0, 6.0]).expand(1, 3, 3)
    draft: Any = SimpleNamespace(kept_tokens=torch.tensor([0, 2]))
    emitted = torch.tensor([[0, 1, 2]])
    given = (draft, of_draft, of_target, emitted, torch.tensor([[5, 6, 7]]), trajectories(), slice(0, 1))
    assert _chance("greedy", *given).tolist() == [[0, 0, 1]]
    q = 1 / (1 + math.exp(-1))
    p = math.exp(3) / (1 + math.exp(0.5) + math.exp(3))
    assert _chance("classic", *given)[0].tolist() == pytest.approx([1, 0, q / p])


def test_a_recorded_text_is_prompt_and_continuation_with_each_layers_residuals() -> None:
    def eager(batch: torch.Tensor, dtype: torch.dtype, layers: tuple[int, ...]) -> Any:
        assert (len(batch), dtype) == (1, torch.float32)
        flat = batch.flatten()[:, None]
        return SimpleNamespace(aux=torch.cat([flat * 10 + j for j in layers], dim=1), normed=flat + 0.5)

    target: Any = SimpleNamespace(eager=eager)
    texts = record(target, [[3], [4, 5]], torch.tensor([[6, 7], [8, 9]]), 0.5, torch.arange(2), [2, 4], batch_size=1)
    assert texts.tokens[0, :3].tolist() == [3, 6, 7]
    assert texts.tokens[1].tolist() == [4, 5, 8, 9]
    assert (texts.prompt_lengths.tolist(), texts.num_generated, texts.temperature) == ([1, 2], 2, 0.5)
    for j in (2, 4):
        assert torch.equal(texts.aux[j][..., 0], texts.tokens * 10 + j)
    assert torch.equal(texts.normed[..., 0], texts.tokens + 0.5)


@pytest.mark.parametrize(
    ("loops", "parts"),
    [
        ([True, True, False, False], {"looping": 2, "not looping": 2}),
        ([True, False, False, False], {"not looping": 3}),
        ([False] * 4, {}),
    ],
)
def test_looping_texts_are_told_apart_where_there_are_several(loops: list[bool], parts: dict[str, int]) -> None:
    rows = [[4.0, 0.0], [4.0, 1.0], [4.0, 2.0], [4.0, 3.0]]
    result = evaluate._by_looping({"greedy": counted(*rows)}, torch.tensor(loops))["greedy"]
    assert result["acceptance_length"] == 1.375
    assert {name: result[name]["num_texts"] for name in ("looping", "not looping") if name in result} == parts
    for name in parts:
        chosen = [row for row, loop in zip(rows, loops, strict=True) if loop is (name == "looping")]
        assert result[name]["acceptance_length"] == counted(*chosen).length


def work_on(*prompts: list[int]) -> Any:
    tokenizer = SimpleNamespace(token_bytes=lambda i: b"x" * i, vocab_size=100)
    return SimpleNamespace(
        target=SimpleNamespace(device=torch.device("cpu")),
        tokenizer=tokenizer,
        prompts=[SimpleNamespace(token_ids=ids) for ids in prompts],
        held_out={"a": [1, 2, 3], "b": [4, 5]},
        say=lambda text: None,
    )


def test_a_files_first_token_is_charged_as_a_uniform_guess(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluate, "held_out_loss", lambda target, sequences, dtype: 2.0)
    row = evaluate._held_out(work_on())
    assert (row["files"], row["tokens"], row["bytes"], row["nats_per_token"]) == (2, 5, 15, 2.0)
    assert row["nats_per_byte"] == pytest.approx((2.0 * 3 + 2 * math.log(100)) / 15)
    assert row["gzip_nats_per_byte_each_file"] > row["gzip_nats_per_byte_one_stream"]


def test_texts_are_written_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def generate(target: Any, batch: Any, count: int, t: torch.Tensor, seeds: torch.Tensor, dtype: Any) -> Any:
        assert (count, dtype, t.tolist()) == (evaluate.NUM_NEW_TOKENS, torch.float32, [0.5] * len(batch))
        calls.append(batch)
        return seeds[:, None] * 10 + torch.tensor([ids[0] for ids in batch])[:, None]

    calls: list[Any] = []
    monkeypatch.setattr(evaluate, "generate", generate)
    monkeypatch.setattr(evaluate, "GENERATION_BATCH", 2)
    for _ in range(2):
        texts = evaluate._texts(work_on([1], [2], [3]), 0.5, tmp_path / "below" / "report.json")
        assert texts.tolist() == [[1], [12], [23]]
    assert calls == [[[1], [2]], [[3]]]


@pytest.mark.parametrize("looping", [[], [0], [0, 1]])
def test_measures_of_texts(looping: list[int]) -> None:
    fresh, same = list(range(30)), [7] * 30
    written = torch.tensor([same if row in looping else fresh for row in range(2)])
    row = evaluate._text_measures(work_on([1], [2]), written)
    assert row["looping_prompts"] == len(looping)
    assert row["distinct_4gram_share"] == pytest.approx((len(looping) / 27 + 2 - len(looping)) / 2)
    assert row["distinct_4gram_share_not_looping"] == (None if len(looping) == 2 else 1.0)


@pytest.mark.parametrize("fc_norm", [True, False])
def test_one_setting_is_wrong_at_a_time(monkeypatch: pytest.MonkeyPatch, fc_norm: bool) -> None:
    rope = SimpleNamespace(interleaved=True)
    config = SimpleNamespace(aux_layer_ids=(1, 3, 5), rope=rope, norm_output=False, fc_norm=fc_norm)
    monkeypatch.setattr(evaluate, "_read", lambda work, kind, over=None: SimpleNamespace(config=config, over=over))
    measured = []

    def measure(target: Any, draft: Any, texts: Any, k: int, rules: Any, *, aux_layer_ids: Any) -> Any:
        changed = {name: getattr(draft.over, name) for name in ("interleaved", "norm_output", "fc_norm")}
        measured.append(({name: value for name, value in changed.items() if value is not None}, aux_layer_ids))
        return {"greedy": counted([4, 0], [2, 0])}

    monkeypatch.setattr(evaluate, "measure", measure)
    rows = evaluate._wrong(work_on(), DraftKind.MLA, trajectories(), counted([4, 2], [2, 3]))
    wanted: list[Any] = [
        ({}, (2, 4, 6)),
        ({}, (5, 3, 1)),
        ({"interleaved": False}, None),
        ({"norm_output": True}, None),
    ]
    assert measured == wanted + ([({"fc_norm": False}, None)] if fc_norm else [])
    assert {(row["acceptance_length"], row["standard_errors_below"]) for row in rows.values()} == {(1.0, 2.0)}


def test_the_scale_that_accepts_most_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    norm = torch.tensor([2.0, 4.0])
    draft: Any = SimpleNamespace(weight={"norm.weight": norm}.__getitem__, config=SimpleNamespace(aux_layer_ids=(1,)))

    def generate(target: Any, prompts: Any, count: int, t: torch.Tensor, seeds: torch.Tensor, dtype: Any) -> str:
        assert (prompts, count, t.tolist(), seeds.tolist()) == ([[1], [2]], 9, [1.0, 1.0], [1000, 1001])
        return "written"

    def record(target: Any, prompts: Any, written: str, t: float, seeds: torch.Tensor, layers: Any) -> str:
        assert (prompts, written, t, seeds.tolist(), layers) == ([[1], [2]], "written", 1.0, [1000, 1001], (1,))
        return "texts"

    def measure(target: Any, draft: Any, texts: str, k: int, rules: Any) -> Any:
        assert (texts, k, rules) == ("texts", 3, ("coupled",))
        return {"coupled": SimpleNamespace(length=3.0 - abs(float(norm[0]) / 2 - 1.12))}

    for replaced in (generate, record, measure):
        monkeypatch.setattr(sharpen, replaced.__name__, replaced)
    target: Any = SimpleNamespace(device=torch.device("cpu"))
    lengths = sharpen.sharpen(draft, target, [[1], [2]], 9)
    assert lengths == pytest.approx({scale: 3.0 - abs(scale - 1.12) for scale in sharpen.SCALES}, abs=1e-5)
    assert norm.tolist() == pytest.approx([2.24, 4.48])


def test_a_curves_points_are_means_of_25_steps() -> None:
    assert plot.smoothed([*[1.0] * 25, *[3.0] * 24, 28.0, 6.0, 8.0]) == [1.0, 4.0, 7.0]


def test_a_plot_has_a_panel_for_what_its_files_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Any] = []
    panels = {name: lambda axes, rows, name=name: drawn.append((name, rows)) for name in ("target", "unloop")}
    monkeypatch.setattr(plot, "_PANELS", panels)
    monkeypatch.setattr(plot, "_plot_drafts", lambda axes, drafts: drawn.append(("drafts", drafts)))
    contents = [{"target": [1], "unloop": [], "drafts": {"mla": [2], "mha": [3]}}, {"drafts": {"mla": [4]}}]
    files = [tmp_path / f"{number}.json" for number in range(2)]
    for file, content in zip(files, contents, strict=True):
        file.write_text(json.dumps(content))
    plot.plot_curves(files, tmp_path / "curves.png")
    assert drawn == [("target", [1]), ("drafts", {"mla": [4], "mha": [3]})]
    drawn.clear()
    plot.plot_curves(files[1:], tmp_path / "curves.png")
    assert drawn == [("drafts", {"mla": [4]})]


@pytest.mark.parametrize("kinds", [[], [DraftKind.MLA], [DraftKind.MLA, DraftKind.MHA]])
def test_drafts_that_there_are_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kinds: Any) -> None:
    def record(target: Any, prompts: Any, written: Any, t: float, seeds: torch.Tensor, layers: list[int]) -> str:
        assert (prompts, written.tolist(), seeds.tolist()) == ([[1], [2]], written_at[t].tolist(), [0, 1])
        assert layers == [1, 2, 3, 4]
        return f"recorded {t:g}"

    def measure(target: Any, draft: Any, texts: str, k: int, rules: tuple[str, ...]) -> Any:
        assert (k, rules) == (3, evaluate.RULES if texts == "recorded 1" else ("greedy",))
        return {rule: counted([4, 2], [2, 1]) for rule in rules}

    monkeypatch.setattr(evaluate, "record", record)
    monkeypatch.setattr(evaluate, "measure", measure)
    config = SimpleNamespace(aux_layer_ids=(1, 3))
    monkeypatch.setattr(evaluate, "_read", lambda work, kind: SimpleNamespace(config=config))
    monkeypatch.setattr(evaluate, "_wrong", lambda work, kind, texts, right: (kind, texts, right.length))
    written_at = {0.0: torch.tensor([[5], [6]]), 1.0: torch.tensor([[7], [8]])}
    work = work_on([1], [2])
    work.folder = tmp_path
    for kind in kinds:
        (tmp_path / evaluate.DRAFT_FOLDERS[kind]).mkdir()
    result = evaluate._drafts(work, written_at)
    assert set(result) == {kind.value for kind in kinds}
    for kind in kinds:
        row = result[kind.value]
        assert {name: set(row[name]) for name in ("temperature 0", "temperature 1")} == {
            "temperature 0": {"greedy"},
            "temperature 1": set(evaluate.RULES),
        }
        assert row["temperature 1"]["coupled"]["acceptance_length"] == 1.5
        assert row["wrong settings"] == (kind, "recorded 0", 1.5)
