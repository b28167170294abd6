"""`python -m kimi_nano prepare | count | train | drafts | sharpen | evaluate | probes | prompts | plot | card`."""

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from kimi_backend.checkpoint.presets import DraftKind
from kimi_nano.recipe import RECIPES, Budget, Run

if TYPE_CHECKING:
    import torch


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m kimi_nano", description="Train and measure kimi-nano.")
    commands = parser.add_subparsers(dest="command", required=True)
    prepare = commands.add_parser("prepare", help="corpus -> tokenizer and token ids")
    prepare.add_argument("data", type=Path)
    prepare.add_argument("--num-prompts", type=int, default=200)
    prepare.add_argument("--tokenizer", type=Path, help="take this target's instead of training one")
    train = commands.add_parser("train", help="target and drafts")
    train.add_argument("data", type=Path)
    train.add_argument("out", type=Path)
    train.add_argument("--target-seconds", type=float, default=110.0)
    train.add_argument("--draft-seconds", type=float, default=70.0, help="of steps; compilation comes on top")
    train.add_argument("--target-steps", type=int, default=0, help="instead of seconds")
    train.add_argument("--unloop-seconds", type=float, default=45.0, help="against loops in what the target writes")
    train.add_argument("--unloop-steps", type=int, default=0, help="instead of seconds")
    train.add_argument("--draft-steps", type=int, default=0, help="instead of seconds")
    train.add_argument("--device", default="auto")
    train.add_argument("--no-compile", action="store_true")
    train.add_argument("--grow-from", type=Path, help="a trained target's folder to begin with")
    kinds = [kind.value for kind in DraftKind]
    train.add_argument("--kinds", nargs="+", choices=kinds, default=kinds, help="of drafts")
    train.add_argument("--pack", type=Path, help="also put archives of the results here")
    unloop = commands.add_parser("unloop", help="train a finished target on, against loops in what it writes")
    unloop.add_argument("checkpoint", type=Path, help="the target's folder")
    unloop.add_argument("data", type=Path)
    unloop.add_argument("out", type=Path)
    unloop.add_argument("--seconds", type=float, default=270.0)
    unloop.add_argument("--steps", type=int, default=0, help="instead of seconds")
    unloop.add_argument("--teacher", type=Path, help="another target's folder; left out, the target teaches itself")
    unloop.add_argument("--device", default="auto")
    drafts = commands.add_parser("drafts", help="drafts of a target that is finished")
    drafts.add_argument("checkpoint", type=Path, help="the target's folder")
    drafts.add_argument("data", type=Path)
    drafts.add_argument("out", type=Path)
    drafts.add_argument("--kinds", nargs="+", choices=[kind.value for kind in DraftKind], default=["mla"])
    drafts.add_argument("--draft-seconds", type=float, default=120.0, help="of steps; compilation comes on top")
    drafts.add_argument("--draft-steps", type=int, default=0, help="instead of seconds")
    drafts.add_argument("--device", default="auto")
    drafts.add_argument("--no-compile", action="store_true")
    drafts.add_argument("--start-from", type=Path, help="a target's folder whose drafts to train on")
    sharpen = commands.add_parser("sharpen", help="scale trained drafts' logits for coupled draws, in place")
    sharpen.add_argument("checkpoint", type=Path, help="the target's folder, with the drafts below it")
    sharpen.add_argument("data", type=Path)
    sharpen.add_argument("--kinds", nargs="+", choices=[kind.value for kind in DraftKind], default=["mla"])
    sharpen.add_argument("--device", default="auto")
    evaluate = commands.add_parser("evaluate", help="measure a checkpoint and its drafts")
    evaluate.add_argument("checkpoint", type=Path)
    evaluate.add_argument("data", type=Path)
    evaluate.add_argument("report", type=Path, help="JSON file to write")
    evaluate.add_argument("--num-prompts", type=int, default=200)
    evaluate.add_argument("--num-files", type=int, default=48, help="held-out files that the loss is measured on")
    evaluate.add_argument("--device", default="auto")
    count = commands.add_parser("count", help="frequencies of the training text's tokens, for a draft of fewer tokens")
    count.add_argument("data", type=Path)
    count.add_argument("out", type=Path, help="such as demo/kimi-nano/draft/token_counts.json")
    probes = commands.add_parser("probes", help="what `kimi probe` says of drafts with a false config.json")
    probes.add_argument("checkpoint", type=Path)
    probes.add_argument("data", type=Path)
    probes.add_argument("report", type=Path, help="JSON file to write")
    probes.add_argument("--num-prompts", type=int, default=24)
    kinds = [kind.value for kind in DraftKind]
    probes.add_argument("--kinds", nargs="+", choices=kinds, default=kinds, help="of the drafts that are there")
    probes.add_argument("--processes", type=int, default=1, help="that share the prompts, one core each")
    prompts = commands.add_parser("prompts", help="held-out prompts as JSON lines, for `kimi probe` and `kimi bench`")
    prompts.add_argument("data", type=Path)
    prompts.add_argument("file", type=Path)
    prompts.add_argument("--num-prompts", type=int, default=40)
    plot = commands.add_parser("plot", help="loss curves as an image")
    plot.add_argument("training", type=Path, nargs="+", help="training.json, draft_training.json")
    plot.add_argument("image", type=Path)
    card = commands.add_parser("card", help="figures of a report into the model card")
    card.add_argument("report", type=Path, nargs="+", help="of `evaluate`; further ones add drafts of the same target")
    card.add_argument("card", type=Path)
    card.add_argument("--probes", type=Path, nargs="+", default=[], help="reports of `probes`")
    for command in (prepare, train, unloop, drafts, sharpen):
        command.add_argument("--recipe", choices=RECIPES, default="nano")
    for command in (train, unloop, drafts, sharpen):
        command.add_argument("--seed", type=int, default=0)
    return parser


def main() -> int:
    args = _parser().parse_args()
    _COMMANDS[args.command](args)
    return 0


def _prepare(args: argparse.Namespace) -> None:
    from kimi_nano.corpus import load_corpus
    from kimi_nano.dataset import prepare

    recipe = RECIPES[args.recipe]
    vocab_size = int(recipe.text["vocab_size"])
    prepare(args.data, load_corpus(), vocab_size, recipe.context, args.num_prompts, args.tokenizer)


def _train(args: argparse.Namespace) -> None:
    from kimi_nano.train import train

    run = Run(
        recipe=RECIPES[args.recipe],
        target=Budget(seconds=args.target_seconds, steps=args.target_steps),
        drafts=Budget(seconds=args.draft_seconds, steps=args.draft_steps),
        unloop=Budget(seconds=args.unloop_seconds, steps=args.unloop_steps),
        seed=args.seed,
        kinds=tuple(DraftKind(kind) for kind in args.kinds),
    )
    device, compiles = _device(args.device), not args.no_compile
    train(
        args.data,
        args.out,
        run,
        device=device,
        compiles=compiles,
        grow_from=args.grow_from,
        pack_to=args.pack,
    )


def _unloop(args: argparse.Namespace) -> None:
    from kimi_nano.train import unloop_of

    budget = Budget(seconds=args.seconds, steps=args.steps)
    run = Run(recipe=RECIPES[args.recipe], target=Budget(), drafts=Budget(), unloop=budget, seed=args.seed)
    unloop_of(args.checkpoint, args.data, args.out, run, device=_device(args.device), teacher=args.teacher)


def _drafts(args: argparse.Namespace) -> None:
    from kimi_nano.train import train_drafts_of

    run = Run(
        recipe=RECIPES[args.recipe],
        target=Budget(),
        drafts=Budget(seconds=args.draft_seconds, steps=args.draft_steps),
        seed=args.seed,
        kinds=tuple(DraftKind(kind) for kind in args.kinds),
    )
    device = _device(args.device)
    compiles = device.type == "cuda" and not args.no_compile
    train_drafts_of(
        args.checkpoint, args.data, args.out, run, device=device, compiles=compiles, start_from=args.start_from
    )


def _sharpen(args: argparse.Namespace) -> None:
    from kimi_nano.dataset import Windows, load
    from kimi_nano.export import read_target
    from kimi_nano.train import sharpen_all

    device = _device(args.device)
    corpus = Windows(load(args.data).train, device, args.seed)
    kinds = [DraftKind(kind) for kind in args.kinds]
    sharpen_all(args.checkpoint, kinds, read_target(args.checkpoint).to(device), corpus, RECIPES[args.recipe])


def _evaluate(args: argparse.Namespace) -> None:
    from kimi_nano.evaluate import evaluate

    device = _device(args.device)
    evaluate(
        args.checkpoint, args.data, args.report, num_prompts=args.num_prompts, num_files=args.num_files, device=device
    )


def _count(args: argparse.Namespace) -> None:
    from kimi_nano.count import count_tokens

    counts = count_tokens(args.data, args.out)
    print(f"{args.out}: {counts.num_tokens:,} tokens, {len(counts.token_ids):,} different ones")


def _probes(args: argparse.Namespace) -> None:
    from kimi_nano.pace import write_json
    from kimi_nano.probe_check import check_probe

    kinds = [DraftKind(kind) for kind in args.kinds]
    write_json(args.report, check_probe(args.checkpoint, _held_out_prompts(args), kinds, num_processes=args.processes))


def _prompts(args: argparse.Namespace) -> None:
    lines = [json.dumps({"input_ids": token_ids}) + "\n" for token_ids in _held_out_prompts(args)]
    args.file.write_text("".join(lines))


def _held_out_prompts(args: argparse.Namespace) -> list[list[int]]:
    from kimi_nano.dataset import load_held_out

    return [prompt.token_ids for prompt in load_held_out(args.data)[1][: args.num_prompts]]


def _plot(args: argparse.Namespace) -> None:
    from kimi_nano.plot import plot_curves

    plot_curves(args.training, args.image)


def _card(args: argparse.Namespace) -> None:
    from kimi_nano.card import write_card

    write_card(args.report, args.card, args.probes)


def _device(name: str) -> "torch.device":
    import torch

    return torch.device(("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name)


_COMMANDS = {
    "prepare": _prepare,
    "train": _train,
    "unloop": _unloop,
    "drafts": _drafts,
    "sharpen": _sharpen,
    "evaluate": _evaluate,
    "count": _count,
    "probes": _probes,
    "prompts": _prompts,
    "plot": _plot,
    "card": _card,
}


if __name__ == "__main__":
    raise SystemExit(main())
