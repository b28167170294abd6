"""The whole of kimi-nano in small: corpus, training, rounding, drafts, files, and the server's own models over them."""

import json
import shutil
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch

from kimi_backend.checkpoint.loading import DraftCheckpoint, TargetCheckpoint
from kimi_backend.checkpoint.presets import DraftKind
from kimi_backend.config.settings import ServingSettings
from kimi_backend.probe.loading import open_probe
from kimi_backend.probe.probing import verdict
from kimi_backend.probe.settings import ProbeSetting
from kimi_backend.runners.load.loading import load_pair
from kimi_nano.acceptance import measure, record
from kimi_nano.dataset import load, prepare
from kimi_nano.drafts import NanoDraft
from kimi_nano.export import DRAFT_FOLDERS, TARGET_FOLDER, read_draft, read_target
from kimi_nano.generate import generate
from kimi_nano.probe_check import check_probe, false_statements, misdeclared
from kimi_nano.recipe import MICRO, Budget, Run
from kimi_nano.sharpen import SCALES, sharpen
from kimi_nano.target import NanoTarget
from kimi_nano.train import train, unloop_of
from support.nano_corpus import made_up_files
from support.speculative_loop import SpeculativeLoop

pytestmark = pytest.mark.soak
"""A minute and more of training: parts of it are tested one by one beside this file."""

CPU = torch.device("cpu")
NUM_PROMPTS = 6
NUM_NEW_TOKENS = 40
K = 3


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("nano")
    prepare(folder / "data", made_up_files(), int(MICRO.text["vocab_size"]), MICRO.context, NUM_PROMPTS)
    return folder / "data"


@pytest.fixture(scope="module")
def checkpoint(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("trained")
    run = Run(recipe=MICRO, target=Budget(steps=40), drafts=Budget(steps=38), unloop=Budget(steps=4))
    train(data, out, run, device=CPU, compiles=False, pack_to=out / "packed")
    return out / TARGET_FOLDER


@pytest.fixture(scope="module")
def target(checkpoint: Path) -> NanoTarget:
    return read_target(checkpoint)


def prompts_of(data: Path) -> list[list[int]]:
    return [prompt.token_ids for prompt in load(data).prompts]


def greedy_text(target: NanoTarget, prompts: list[list[int]]) -> torch.Tensor:
    seeds = torch.arange(len(prompts))
    return generate(target, prompts, NUM_NEW_TOKENS, torch.zeros(len(prompts)), seeds, torch.float32)


def acceptance_length(target: NanoTarget, draft: NanoDraft, prompts: list[list[int]]) -> float:
    seeds, written = torch.arange(len(prompts)), greedy_text(target, prompts)
    texts = record(target, prompts, written, 0.0, seeds, draft.config.aux_layer_ids)
    return measure(target, draft, texts, K, ("greedy",))["greedy"].length


def test_the_losses_fall(checkpoint: Path) -> None:
    training = json.loads((checkpoint.parent / "training.json").read_text())
    losses = [row["loss"] for row in training["target"]]
    assert losses[-1] < 0.5 * losses[0]
    assert set(training["drafts"]) == {"mla", "mla31", "mha"}
    for rows in training["drafts"].values():
        for step in range(1, MICRO.unroll + 1):
            assert rows[-1][f"loss_{step}"] < 0.9 * rows[0][f"loss_{step}"]


def test_rounding_experts_costs_little_after_training_with_it(checkpoint: Path) -> None:
    losses = json.loads((checkpoint.parent / "training.json").read_text())["facts"]["losses"]
    assert losses["int4_at_end"] < losses["float_at_switch"]
    assert abs(losses["int4_at_end"] - losses["float_at_end"]) < 0.05


def test_the_servers_target_computes_the_trainers_text(data: Path, checkpoint: Path, target: NanoTarget) -> None:
    prompts = prompts_of(data)[:2]
    runner, _ = load_pair(ServingSettings(checkpoint=str(checkpoint), device="cpu", max_num_seqs=4))
    wanted = greedy_text(target, prompts)
    for prompt, written in zip(prompts, wanted.tolist(), strict=True):
        loop = SpeculativeLoop(runner, None, [prompt], 0)
        assert loop.run(len(prompt) + NUM_NEW_TOKENS)[0][len(prompt) :] == written


@pytest.mark.parametrize("kind", DRAFT_FOLDERS)
def test_a_trained_draft_gets_more_accepted(kind: DraftKind, data: Path, checkpoint: Path, target: NanoTarget) -> None:
    prompts = prompts_of(data)
    trained = read_draft(checkpoint / DRAFT_FOLDERS[kind], target.config)
    head = None if trained.kept_tokens is None else target.weight("lm_head.weight")[trained.kept_tokens]
    untrained = NanoDraft(trained.config, head, trained.kept_tokens).requires_grad_(False)
    assert acceptance_length(target, trained, prompts) > acceptance_length(target, untrained, prompts) + 0.3


@pytest.mark.parametrize(
    ("kind", "temperature"),
    [(DraftKind.MLA, 1.0), (DraftKind.MLA31, 0.0), (DraftKind.MHA, 1.0)],
)
def test_serving_accepts_what_the_measure_says(
    kind: DraftKind, temperature: float, data: Path, checkpoint: Path, target: NanoTarget
) -> None:
    prompts = prompts_of(data)[:2]
    draft = read_draft(checkpoint / DRAFT_FOLDERS[kind], target.config)
    seeds = torch.full((2,), 7)
    written = generate(target, prompts, NUM_NEW_TOKENS, torch.full((2,), temperature), seeds, torch.float32)
    texts = record(target, prompts, written, temperature, seeds, draft.config.aux_layer_ids)
    rule = "coupled" if temperature else "greedy"
    measured = measure(target, draft, texts, K, (rule,))[rule]
    settings = ServingSettings(
        checkpoint=str(checkpoint), draft=str(checkpoint / DRAFT_FOLDERS[kind]), device="cpu", max_num_seqs=4
    )
    target_runner, draft_runner = load_pair(settings)
    for index, prompt in enumerate(prompts):
        loop = SpeculativeLoop(target_runner, draft_runner, [prompt], K, temperature=temperature, seed=7)
        loop.run(len(prompt) + NUM_NEW_TOKENS)
        rounds = int(measured.reached[index, 0])
        assert sum(loop.sequences[0].accepted[:rounds]) == int(measured.reached[index, 1:].sum())


def test_both_aux_encodings_are_in_the_files(checkpoint: Path) -> None:
    config = TargetCheckpoint.open(checkpoint).config
    listed = {}
    for kind, name in DRAFT_FOLDERS.items():
        stored = json.loads((checkpoint / name / "config.json").read_text())
        listed[kind] = stored["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
        assert DraftCheckpoint.open(checkpoint / name, config).config.aux_layer_ids == (2, 4, 5)
    assert listed[DraftKind.MLA] == [2, 4, 5]
    assert listed[DraftKind.MLA31] == [1, 3, 4]


def test_the_archives_hold_the_checkpoints(checkpoint: Path, tmp_path: Path) -> None:
    for name in ("target.tar", "drafts.tar"):
        shutil.unpack_archive(checkpoint.parent / "packed" / name, tmp_path, filter="data")
    packed = {path.relative_to(tmp_path / TARGET_FOLDER) for path in tmp_path.rglob("*") if path.is_file()}
    assert packed == {path.relative_to(checkpoint) for path in checkpoint.rglob("*") if path.is_file()}


def _with_config(folder: Path, to: Path, **eagle: object) -> Path:
    shutil.copytree(folder, to)
    config = json.loads((to / "config.json").read_text())
    config["eagle_config"] |= eagle
    (to / "config.json").write_text(json.dumps(config))
    return to


def test_the_probe_accepts_what_serving_does(data: Path, checkpoint: Path, target: NanoTarget) -> None:
    folder = checkpoint / DRAFT_FOLDERS[DraftKind.MLA31]
    prompts = prompts_of(data)[:3]
    lengths = _probe(checkpoint, folder, prompts, lambda setting: setting.is_files_own)
    draft = read_draft(folder, target.config)
    written = greedy_text(target, prompts)
    texts = record(target, prompts, written, 0.0, torch.arange(3), draft.config.aux_layer_ids)
    assert lengths == pytest.approx(measure(target, draft, texts, K, ("greedy",))["greedy"].lengths.tolist())


def test_the_probes_overrides_mend_a_file_that_counts_layers_wrongly(
    data: Path, checkpoint: Path, tmp_path: Path
) -> None:
    folder, prompts = checkpoint / DRAFT_FOLDERS[DraftKind.MLA31], prompts_of(data)[:2]
    wrong = _with_config(
        folder, tmp_path / "wrong", eagle_aux_hidden_state_layer_ids=[2, 4, 5], aux_layer_id_encoding="output"
    )
    right = _probe(checkpoint, folder, prompts, lambda setting: setting.is_files_own)
    mended = _probe(
        checkpoint, wrong, prompts, lambda s: set(_overridden(s)) == {"aux_layer_ids"} and s.aux == "R(2),R(4),R(5)"
    )
    assert mended == right
    assert _probe(checkpoint, wrong, prompts, lambda setting: setting.is_files_own) != right


def _probe(
    checkpoint: Path, draft: Path, prompts: list[list[int]], chooses: Callable[[ProbeSetting], bool]
) -> tuple[float, ...]:
    """Acceptance lengths under the one candidate that is chosen."""
    opened = open_probe(ServingSettings(checkpoint=str(checkpoint), device="cpu", draft=str(draft)), MICRO.context)
    (setting,) = (candidate for candidate in opened.candidates if chooses(candidate))
    texts = opened.write_texts(prompts, NUM_NEW_TOKENS)
    (result,) = replace(opened, candidates=[setting]).run(texts, K)
    return result.lengths


def _overridden(setting: ProbeSetting) -> list[str]:
    return [field.name for field in fields(setting.overrides) if getattr(setting.overrides, field.name) is not None]


def test_a_false_config_is_mended_by_the_probes_setting(checkpoint: Path, tmp_path: Path) -> None:
    """Each false statement has a candidate setting that gives the draft its true config back."""
    target = TargetCheckpoint.open(checkpoint).config
    folder = checkpoint / DRAFT_FOLDERS[DraftKind.MLA31]
    truth = DraftCheckpoint.open(folder, target).config
    for number, changes in enumerate(false_statements(truth).values()):
        wrong = misdeclared(folder, tmp_path / str(number), changes)
        assert DraftCheckpoint.open(wrong, target).config != truth
        settings = ServingSettings(checkpoint=str(checkpoint), device="cpu", draft=str(wrong))
        candidates = open_probe(settings, MICRO.context).candidates
        mended = [DraftCheckpoint.open(wrong, target, candidate.overrides).config for candidate in candidates]
        assert truth in mended


def test_the_probe_check_measures_as_the_probe_does_however_many_processes_share_the_prompts(
    data: Path, checkpoint: Path
) -> None:
    kind, prompts = DraftKind.MLA, [prompt[-24:] for prompt in prompts_of(data)[:2]]
    shared = check_probe(checkpoint, prompts, [kind], num_processes=2, num_tokens=8)
    assert shared == check_probe(checkpoint, prompts, [kind], num_tokens=8)
    opened = open_probe(
        ServingSettings(checkpoint=str(checkpoint), device="cpu", draft=str(checkpoint / DRAFT_FOLDERS[kind])),
        MICRO.context,
    )
    statements = {row["false statement"]: row for row in shared["mla"]}
    assert set(statements) == {"nothing", *false_statements(opened.draft.config)}
    results = list(opened.run(opened.write_texts(prompts, 8), K))
    own = next(result for result in results if result.setting.is_files_own)
    assert statements["nothing"]["file's acceptance length"] == own.acceptance_length
    assert statements["nothing"]["chosen"] == verdict(results)[0].setting.name


def test_a_finished_target_is_trained_on(data: Path, checkpoint: Path, tmp_path: Path) -> None:
    run = Run(recipe=MICRO, target=Budget(), drafts=Budget(), unloop=Budget(steps=4))
    unloop_of(checkpoint, data, tmp_path, run, device=CPU)
    record = json.loads((tmp_path / "unloop_training.json").read_text())
    assert record["unloop"] and abs(record["unloop_losses"]["int4_after"] - record["unloop_losses"]["before"]) < 0.5
    assert not torch.equal(
        read_target(tmp_path / TARGET_FOLDER).weight("lm_head.weight"), read_target(checkpoint).weight("lm_head.weight")
    )


def test_sharpening_keeps_greedy_drafts_and_costs_no_coupled_ones(
    data: Path, checkpoint: Path, target: NanoTarget
) -> None:
    draft = read_draft(checkpoint / DRAFT_FOLDERS[DraftKind.MLA], target.config)
    prompts = [prompt[-40:] for prompt in prompts_of(data)]
    before, norm = acceptance_length(target, draft, prompts), draft.weight("norm.weight").clone()
    shorter = [prompt[-24:] for prompt in prompts]
    lengths = sharpen(draft, target, shorter, num_tokens=NUM_NEW_TOKENS)
    best = max(lengths, key=lengths.__getitem__)
    assert torch.equal(draft.weight("norm.weight"), norm * best)
    assert acceptance_length(target, draft, prompts) == before


def test_sharpening_a_draft_that_reads_its_normed_state_takes_the_best_scale(
    data: Path, checkpoint: Path, target: NanoTarget
) -> None:
    draft = read_draft(checkpoint / DRAFT_FOLDERS[DraftKind.MLA31], target.config)
    assert draft.config.norm_output
    norm = draft.weight("norm.weight").clone()
    lengths = sharpen(draft, target, [prompt[-24:] for prompt in prompts_of(data)], num_tokens=NUM_NEW_TOKENS)
    assert torch.equal(draft.weight("norm.weight"), norm * max(lengths, key=lengths.__getitem__))


def test_the_trainer_sharpens_every_draft(checkpoint: Path) -> None:
    sharpened = json.loads((checkpoint.parent / "training.json").read_text())["draft_facts"]["sharpened"]
    assert {kind: len(lengths) for kind, lengths in sharpened.items()} == dict.fromkeys(
        ("mla", "mla31", "mha"), len(SCALES)
    )
