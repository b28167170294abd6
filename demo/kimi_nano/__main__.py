"""`python -m kimi_nano prepare | train | evaluate | card`."""

import argparse
from pathlib import Path

from kimi_nano.recipe import RECIPES, Budget, Run


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m kimi_nano", description="Train and measure kimi-nano.")
    commands = parser.add_subparsers(dest="command", required=True)
    prepare = commands.add_parser("prepare", help="corpus -> tokenizer and token ids")
    prepare.add_argument("data", type=Path)
    prepare.add_argument("--num-prompts", type=int, default=200)
    train = commands.add_parser("train", help="target and drafts")
    train.add_argument("data", type=Path)
    train.add_argument("out", type=Path)
    train.add_argument("--target-seconds", type=float, default=110.0)
    train.add_argument("--draft-seconds", type=float, default=70.0)
    train.add_argument("--target-steps", type=int, default=0, help="instead of seconds")
    train.add_argument("--draft-steps", type=int, default=0, help="instead of seconds")
    train.add_argument("--device", default="cuda")
    train.add_argument("--no-compile", action="store_true")
    train.add_argument("--pack", type=Path, help="also put archives of the results here")
    for command in (prepare, train):
        command.add_argument("--recipe", choices=RECIPES, default="nano")
        command.add_argument("--seed", type=int, default=0)
    return parser


def main() -> int:
    args = _parser().parse_args()
    recipe = RECIPES[args.recipe]
    if args.command == "prepare":
        from kimi_nano.corpus import load_corpus
        from kimi_nano.dataset import prepare

        prepare(args.data, load_corpus(), int(recipe.text["vocab_size"]), recipe.context, args.num_prompts)
        return 0
    import torch

    from kimi_nano.train import train

    run = Run(
        recipe=recipe,
        target=Budget(seconds=args.target_seconds, steps=args.target_steps),
        drafts=Budget(seconds=args.draft_seconds, steps=args.draft_steps),
        seed=args.seed,
    )
    device, compiles = torch.device(args.device), not args.no_compile
    train(args.data, args.out, run, device=device, compiles=compiles, pack_to=args.pack)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
