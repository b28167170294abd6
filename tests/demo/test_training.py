"""The trainer in small: drafts' steps, stages that a recipe leaves out, and a target that unlearns its own repeats.

One file, as what torch loads before an optimizer's first step takes longer than all of it.
"""

import tarfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from kimi_backend.checkpoint.presets import DraftKind
from kimi_nano import train
from kimi_nano.dataset import Windows
from kimi_nano.export import bake
from kimi_nano.features import DraftBatch, run_target
from kimi_nano.generate import generate
from kimi_nano.recipe import MICRO, Budget, Run
from kimi_nano.target import NanoTarget
from kimi_nano.text_measures import distinct_4gram_share
from kimi_nano.train_drafts import make_drafts, train_drafts
from kimi_nano.unloop import OwnText, WrittenText, baked_copy, divergence_from_teacher, repeated_tokens, without_repeats

CPU = torch.device("cpu")


class SameBatch:
    """A source of one batch."""

    def __init__(self, batch: DraftBatch) -> None:
        self._batch = batch

    def next(self) -> DraftBatch:
        return self._batch


@pytest.fixture
def target() -> NanoTarget:
    torch.manual_seed(0)
    target = NanoTarget(MICRO.target_config()).requires_grad_(False)
    target.weight("lm_head.weight").mul_(3)  # so that there is something to predict
    return target


def corpus() -> Windows:
    return Windows(np.arange(2000, dtype=np.uint16) % 500, CPU, seed=0)


def test_steps_lower_every_drafts_losses_and_leave_the_target_alone(target: NanoTarget) -> None:
    recipe = replace(MICRO, unroll=1, draft_warmup_steps=1, coupled_from=2.0)  # what the losses are stays
    run = Run(recipe=recipe, target=Budget(), drafts=Budget(steps=6), kinds=(DraftKind.MLA, DraftKind.MHA))
    drafts = make_drafts(run, target, torch.arange(768))
    layers = sorted({j for draft in drafts.values() for j in draft.config.aux_layer_ids})
    batch = run_target(target, torch.randint(0, 500, (4, 24)), torch.ones(4), layers, torch.float32)
    before = [weight.clone() for weight in target.state_dict().values()]
    curves = train_drafts(drafts, target, SameBatch(batch), run, torch.float32)
    for kind in run.kinds:
        losses = [row["loss_1"] for row in curves[kind.value].rows]
        assert len(losses) == 5
        assert losses[-1] < 0.8 * losses[0], losses
    assert all(map(torch.equal, before, target.state_dict().values()))


def test_a_recipe_may_leave_sharpening_out(target: NanoTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = []

    def sharpen_file(folder: Path, kind: DraftKind, recipe: object, target: object, prompts: list[list[int]]) -> object:
        assert (len(prompts), len(prompts[0])) == (MICRO.sharpen_prompts, MICRO.context // 8)
        folders.append(folder.name)
        return {1.0: 2.5}

    monkeypatch.setattr(train, "sharpen_file", sharpen_file)
    kinds = tuple(train.DRAFT_FOLDERS)
    assert train.sharpen_all(Path(), kinds, target, corpus(), replace(MICRO, sharpen_prompts=0)) == {}
    assert train.sharpen_all(Path(), kinds, target, corpus(), MICRO) == {kind.value: {1.0: 2.5} for kind in kinds}
    assert folders == list(train.DRAFT_FOLDERS.values())


@pytest.mark.parametrize("budget", [Budget(), Budget(steps=2), Budget(seconds=3.0)])
def test_a_run_may_leave_training_against_loops_out(
    target: NanoTarget, monkeypatch: pytest.MonkeyPatch, budget: Budget
) -> None:
    def unloop(target: object, corpus: object, line_ends: torch.Tensor, given: Budget, *rest: object) -> object:
        assert rest == (MICRO.unloop, torch.float32, teacher)
        assert 0 < int(line_ends.sum()) < len(line_ends) == MICRO.text["vocab_size"]
        return SimpleNamespace(rows=[{"steps": given.steps, "seconds": given.seconds}])

    monkeypatch.setattr(train, "unloop", unloop)
    monkeypatch.setattr(
        train, "load_tokenizer", lambda path: SimpleNamespace(token_bytes=lambda i: b"a\n"[: 1 + i % 2])
    )
    run = Run(recipe=MICRO, target=Budget(), drafts=Budget(), unloop=budget)
    teacher: Any = object()
    rows = train._unloop(target, corpus(), run, torch.float32, Path(), teacher)
    assert rows == ([] if budget == Budget() else [{"steps": budget.steps, "seconds": budget.seconds}])


def test_a_recipe_may_leave_the_targets_own_text_out(target: NanoTarget) -> None:
    run = Run(recipe=replace(MICRO, generated_sequences=0), target=Budget(), drafts=Budget(steps=1), seed=7)
    assert train._own_text(target, corpus(), run, torch.float32, 0.0) == {}
    short = replace(MICRO, generated_sequences=3, generated_prompt_tokens=4, generated_tokens=5)
    written = train._own_text(target, corpus(), replace(run, recipe=short), torch.float32, 0.0)
    assert {temperature: len(text._stream) for temperature, text in written.items()} == {0.0: 18, 1.0: 9}
    texts = torch.cat([text._stream.view(-1, 9).long() for text in written.values()])
    temperatures, seeds = torch.tensor([0.0, 0.0, 1.0]), 7 + torch.tensor([0, 2, 1])
    again = generate(target, texts[:, :4].tolist(), 5, temperatures, seeds, torch.float32)
    assert torch.equal(again, texts[:, 4:])


def test_a_token_repeats_when_it_completes_an_earlier_4gram_of_its_row() -> None:
    written = torch.tensor([[1, 2, 3, 4, 9, 1, 2, 3, 4, 5], [5, 5, 5, 5, 5, 5, 1, 2, 3, 4]])
    assert [row.nonzero().flatten().tolist() for row in repeated_tokens(written, 4)] == [[8], [4, 5]]


def test_repeated_tokens_are_what_the_measure_counts() -> None:
    written = torch.randint(0, 3, (5, 60), generator=torch.Generator().manual_seed(0))
    for row, repeats in zip(written.tolist(), repeated_tokens(written, 4), strict=True):
        assert distinct_4gram_share(row) == 1 - int(repeats.sum()) / (len(row) - 3)


def test_the_teacher_without_repeats_keeps_the_rest_in_proportion() -> None:
    logits = torch.tensor([[1.0, 2.0, 3.0], [1.0, 2.0, 3.0]])
    probabilities = without_repeats(logits, torch.tensor([2, 2]), torch.tensor([True, False]))
    torch.testing.assert_close(probabilities[0, :2], logits[0, :2].softmax(0))
    assert probabilities[0, 2] == 0
    torch.testing.assert_close(probabilities[1], logits[1].softmax(0))


def test_a_target_differs_from_its_teacher_only_in_repeats() -> None:
    text, target = own_text(0)
    assert 0.3 < text.repeated_share < 1
    kept = replace(text, repeats=torch.zeros_like(text.repeats))
    assert abs(float(divergence_from_teacher(target, kept, torch.float32))) < 1e-6
    assert float(divergence_from_teacher(target, text, torch.float32)) > 0.01


def test_training_towards_the_teacher_takes_repeats_out() -> None:
    text, target = own_text(0)
    target.requires_grad_(True)
    optimizer = torch.optim.Adam(target.parameters(), lr=1e-3)
    before = divergence_from_teacher(target, text, torch.float32)
    for _ in range(5):
        optimizer.zero_grad()
        divergence_from_teacher(target, text, torch.float32).backward()
        optimizer.step()
    assert divergence_from_teacher(target, text, torch.float32) < 0.8 * before


LINE_ENDS = torch.arange(MICRO.target_config().vocab_size) % 3 == 0


def own_text(seed: int) -> tuple[WrittenText, NanoTarget]:
    """Text of a target that repeats its last token, and the target with the weights that wrote it."""
    torch.manual_seed(seed)
    target = NanoTarget(MICRO.target_config()).requires_grad_(False)
    target.weight("model.embed_tokens.weight").mul_(20)
    target.weight("lm_head.weight").copy_(target.weight("model.embed_tokens.weight") / 4)
    stream = np.random.default_rng(seed).integers(1, 500, 4000).astype(np.uint16)  # 0 pads
    windows = Windows(stream, CPU, seed)
    text = OwnText(target, baked_copy(target), windows, LINE_ENDS, MICRO.unloop, torch.float32).write()
    bake(target)
    return text, target


def test_own_text_follows_prompts_of_many_lengths() -> None:
    (text, target), recipe = own_text(0), MICRO.unloop
    assert text.tokens.shape == (recipe.own_sequences, recipe.window)
    lengths = text.places[:, 0]
    assert len(set(lengths.tolist())) > recipe.own_sequences // 2
    zero = torch.zeros(1)
    for tokens, repeats, length in zip(text.tokens, text.repeats, lengths.tolist(), strict=True):
        assert LINE_ENDS[tokens[length - 1]] and length >= recipe.shortest_prompt
        written = generate(target, [tokens[:length].tolist()], recipe.own_tokens, zero, zero.long(), torch.float32)
        assert torch.equal(written[0], tokens[length : length + recipe.own_tokens])
        assert torch.equal(repeats, repeated_tokens(written, recipe.gram)[0])
        assert not tokens[length + recipe.own_tokens :].any()


def replace_stage(monkeypatch: pytest.MonkeyPatch, calls: list[tuple[Any, ...]], name: str, result: object) -> None:
    def stage(*given: Any, **named: Any) -> Any:
        calls.append((name, *given, *named.items()))
        return name if result is None else result

    monkeypatch.setattr(train, name, stage)


@pytest.fixture
def stages(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Calls of a training's stages, none of which does anything: each returns its own name, or what its caller uses."""
    torch.manual_seed(0)
    calls: list[tuple[Any, ...]] = []
    rows = [{"seconds": 1.5}, {"seconds": 2.5}]
    losses = iter(range(9))
    curve = SimpleNamespace(rows=rows)
    held_out = {str(i): [i] for i in range(60)}
    made = {DraftKind.MLA: "made"}
    results: dict[str, Any] = {
        "load": SimpleNamespace(train=np.array([1, 1, 2]), held_out=held_out),
        "train_target": (curve, {"read": 4.0}),
        "_finish_drafts": {"drafts": {}},
        "_unloop": rows,
        "make_drafts": made,
    }
    names = "load Windows grow train_target write_target pack _unloop bake unbake _own_text make_drafts _align"
    for name in [*names.split(), "_start_from", "_finish_drafts", "write_json"]:
        replace_stage(monkeypatch, calls, name, results.get(name))
    monkeypatch.setattr(train, "held_out_loss", lambda target, watched, dtype: (next(losses), len(watched)))
    monkeypatch.setattr(train, "_say", lambda started, text: None)
    return calls


class ModelOfStages(torch.nn.Linear):
    """A target or draft of six parameters."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.config = SimpleNamespace(vocab_size=4)
        self.device = CPU
        self.quantizes = self.is_compiled = False

    def compile_layers(self) -> None:
        assert not self.is_compiled
        self.is_compiled = True

    compile_step = compile_layers


def told(calls: list[tuple[Any, ...]], known: dict[str, Any]) -> list[tuple[Any, ...]]:
    """The calls with objects by name, tensors and arrays as lists."""

    def short(x: Any) -> Any:
        name = next((name for name, value in known.items() if value is x), None)
        return name or (x.tolist() if isinstance(x, torch.Tensor | np.ndarray) else len(x) if x == WATCHED else x)

    return [tuple(map(short, call)) for call in calls]


WATCHED = [[i] for i in range(train.WATCHED_FILES)]


@pytest.mark.parametrize(("packs", "grows", "compiles"), [(True, True, True), (False, False, False)])
def test_a_training_runs_its_stages_in_order(
    stages: list[tuple[Any, ...]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    packs: bool,
    grows: bool,
    compiles: bool,
) -> None:
    target, data, out, to = ModelOfStages(), Path("data"), tmp_path / "a" / "b", Path("packed")
    monkeypatch.setattr(train, "NanoTarget", lambda config: target)
    monkeypatch.setattr(train, "read_target", lambda folder: f"read {folder}")
    run = Run(recipe=MICRO, target=Budget(), drafts=Budget(), seed=7)
    train.train(
        data, out, run, device=CPU, compiles=compiles, grow_from=Path("old") if grows else None,
        pack_to=to if packs else None,
    )  # fmt: skip
    assert torch.initial_seed() == 7
    assert out.is_dir() and target.is_compiled is compiles
    packed = [("pack", "out", to)] if packs else []
    rows = [{"seconds": 1.5}, {"seconds": 2.5}]
    calls = told(stages, {"target": target, "run": run, "recipe": MICRO, "out": out})
    record = calls[-2 if packs else -1][2]
    shortened = [call[:-1] if call[0] == "_own_text" else call for call in calls]  # without when it started
    names = data / "tokenizer"
    made = {DraftKind.MLA: "made"}
    assert shortened == [
        ("load", data),
        ("Windows", [1, 1, 2], CPU, 7),
        *([("grow", "target", "read old")] if grows else []),
        ("train_target", "target", "Windows", "run", torch.float32, train.WATCHED_FILES),
        ("write_target", out / train.READ_FOLDER, "target", "recipe", names),
        *packed,
        ("_unloop", "target", "Windows", "run", torch.float32, names),
        ("write_target", out / train.TARGET_FOLDER, "target", "recipe", names),
        ("bake", "target"),
        ("write_json", out / "training.json", record),
        *packed,
        ("_own_text", "target", "Windows", "run", torch.float32),
        ("make_drafts", "run", "target", [0, 2, 1, 0]),
        ("_align", made, "target", "Windows", "run", torch.float32),
        ("_finish_drafts", made, "target", "Windows", "_own_text", "run", torch.float32, "out", compiles),
        ("write_json", out / "training.json", record),
        *packed,
    ]
    assert (record["target"], record["unloop"], record["drafts"]) == (rows, rows, {})
    facts = record["facts"]
    assert [facts[name] for name in ("device", "seed", "compiled")] == ["cpu", 7, compiles]
    assert [facts[name] for name in ("target_parameters", "target_steps", "target_seconds")] == [6, 3, 2.5]
    assert facts["losses"] == {"read": 4.0, "int4_after_unloop": (0, train.WATCHED_FILES)}


@pytest.mark.parametrize("start_from", [None, Path("earlier")])
def test_drafts_start_aligned_or_from_earlier_ones(
    stages: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch, start_from: Path | None
) -> None:
    target, data, out, made = ModelOfStages(), Path("data"), Path("out"), {DraftKind.MLA: "made"}
    monkeypatch.setattr(train, "read_target", lambda folder: target)
    run = Run(recipe=MICRO, target=Budget(), drafts=Budget(), seed=7)
    train.train_drafts_of(Path("folder"), data, out, run, device=CPU, compiles=True, start_from=start_from)
    calls = told(stages, {"target": target, "run": run})
    assert torch.initial_seed() == 7
    starts: Any = ("_align", made, "target", "Windows", "run", torch.bfloat16)
    assert [call[:-1] if call[0] == "_own_text" else call for call in calls] == [
        ("load", data),
        ("Windows", [1, 1, 2], CPU, 7),
        ("_own_text", "target", "Windows", "run", torch.bfloat16),
        ("make_drafts", "run", "target", [0, 2, 1, 0]),
        ("_start_from", made, start_from, "target") if start_from else starts,
        ("_finish_drafts", made, "target", "Windows", "_own_text", "run", torch.bfloat16, out, True),
        ("write_json", out / "draft_training.json", {"drafts": {}}),
    ]


@pytest.mark.parametrize(("compiles", "is_compiled"), [(False, False), (True, False), (True, True)])
def test_drafts_are_trained_written_and_sharpened(
    monkeypatch: pytest.MonkeyPatch, compiles: bool, is_compiled: bool
) -> None:
    target, draft, kind = ModelOfStages(), ModelOfStages(), DraftKind.MLA31
    target.is_compiled = is_compiled
    rows = [{"seconds": 1.5}, {"seconds": 2.5}]
    results = {"train_drafts": {kind.value: SimpleNamespace(rows=rows)}, "sharpen_all": {kind.value: {1.0: 2.5}}}
    calls: list[tuple[Any, ...]] = []
    for name in ("draft_batches", "train_drafts", "write_draft", "sharpen_all"):
        replace_stage(monkeypatch, calls, name, results.get(name))
    run = Run(recipe=MICRO, target=Budget(), drafts=Budget())
    drafts, folder, given = {kind: draft}, Path("out") / train.TARGET_FOLDER, ("corpus", "own", run, torch.float32)
    record = train._finish_drafts(drafts, target, *given, Path("out"), compiles)  # type: ignore[arg-type]
    assert (target.is_compiled, draft.is_compiled) == (compiles, compiles)
    assert calls == [
        ("draft_batches", drafts, target, *given),
        ("train_drafts", drafts, target, "draft_batches", run, torch.float32, ("captures", compiles)),
        ("write_draft", folder / train.DRAFT_FOLDERS[kind], draft, kind, MICRO),
        ("sharpen_all", folder, (kind,), target, "corpus", MICRO),
    ]
    facts = {"device": "cpu", "steps": 3, "seconds": 2.5, "parameters": {kind.value: 6}}
    assert record == {
        "drafts": {kind.value: rows},
        "draft_facts": facts | {"sharpened": results["sharpen_all"]},
    }


@pytest.mark.parametrize("teacher", [None, Path("teacher")])
def test_a_finished_target_trains_on_against_its_loops(
    stages: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch, teacher: Path | None
) -> None:
    target, taught_by, data, out = ModelOfStages(), ModelOfStages(), Path("data"), Path("out")
    monkeypatch.setattr(train, "read_target", lambda folder: taught_by if folder == teacher else target)
    monkeypatch.setattr(
        train, "held_out_loss", lambda given, watched, dtype: (given is target, target.quantizes, len(watched), dtype)
    )
    run = Run(recipe=MICRO, target=Budget(), drafts=Budget(), seed=7)
    target.quantizes = True
    train.unloop_of(Path("folder"), data, out, run, device=CPU, teacher=teacher)
    names, watched = data / "tokenizer", (train.WATCHED_FILES, torch.float32)
    losses = {"before": (True, True, *watched), "float_after": (True, False, *watched)}
    record = {
        "unloop": [{"seconds": 1.5}, {"seconds": 2.5}],
        "unloop_losses": losses | {"int4_after": (True, True, *watched)},
    }
    assert torch.initial_seed() == 7 and not target.is_compiled
    assert told(stages, {"target": target, "teacher": taught_by, "run": run, "recipe": MICRO}) == [
        ("load", data),
        ("unbake", "target"),
        ("Windows", [1, 1, 2], CPU, 7),
        ("_unloop", "target", "Windows", "run", torch.float32, names, "teacher" if teacher else None),
        ("write_target", out / train.TARGET_FOLDER, "target", "recipe", names),
        ("bake", "target"),
        ("write_json", out / "unloop_training.json", record),
    ]


def test_only_drafts_of_one_attention_kind_are_aligned(target: NanoTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(recipe=MICRO, target=Budget(), drafts=Budget(), kinds=(DraftKind.MLA, DraftKind.MHA))
    drafts = make_drafts(run, target, torch.arange(768))
    aligned = []

    def align(draft: object, given: object, batch: torch.Tensor, dtype: torch.dtype) -> None:
        assert given is target and dtype == torch.float32
        aligned.append((draft, tuple(batch.shape)))

    monkeypatch.setattr(train, "align", align)
    train._align(drafts, target, corpus(), run, torch.float32)
    assert aligned == [(drafts[DraftKind.MLA], (train.ALIGNED_WINDOWS, MICRO.draft_window))]
    others = make_drafts(run, target, torch.arange(768))
    kinds = {train.DRAFT_FOLDERS[kind]: kind for kind in others}
    monkeypatch.setattr(train, "read_draft", lambda folder, config: others[kinds[folder.name]])
    for weight in (weight for draft in others.values() for weight in draft.parameters()):
        weight.data.add_(1)
    train._start_from(drafts, Path("earlier"), target)
    for kind, draft in drafts.items():
        assert all(map(torch.equal, draft.parameters(), others[kind].parameters()))


def test_what_is_written_is_packed(tmp_path: Path) -> None:
    out, folder, name = (
        tmp_path / "out",
        tmp_path / "out" / train.TARGET_FOLDER,
        next(iter(train.DRAFT_FOLDERS.values())),
    )
    for file in (out / train.READ_FOLDER / "config.json", folder / "b.bin", folder / "a.bin", folder / name / "d.bin"):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("content")
    (out / "training.json").write_text("{}")
    to = tmp_path / "x" / "packed"
    for _ in range(2):
        train.pack(out, to)
    assert sorted(file.name for file in to.iterdir()) == ["drafts.tar", "read.tar", "target.tar", "training.json"]
    packed = {}
    for file in to.glob("*.tar"):
        with tarfile.open(file) as archive:
            packed[file.name] = archive.getnames()
    draft = f"{train.TARGET_FOLDER}/{name}"
    assert packed == {
        "read.tar": [f"{train.READ_FOLDER}/config.json"],
        "target.tar": [f"{train.TARGET_FOLDER}/a.bin", f"{train.TARGET_FOLDER}/b.bin"],
        "drafts.tar": [draft, f"{draft}/d.bin"],
    }
