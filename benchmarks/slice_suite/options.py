"""The options of `benchmarks/slice.py`, and the cases that they name."""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kimi_backend.checkpoint.presets import Preset
from kimi_backend.config.quantization_config import QuantizationMethod
from slice_suite.prompt_steps import PromptStep
from slice_suite.scripted_matches import MatchScript


def parse_options(about: str | None) -> argparse.Namespace:
    """about: what the script does."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    numbers = lambda text: [int(part) for part in text.split(",")]  # noqa: E731
    parser.add_argument("--preset", type=Preset, default=Preset.KIMI_K25, help="tiny runs on a CPU")
    parser.add_argument("--quantization", type=QuantizationMethod, default=QuantizationMethod.INT4, help="experts")
    parser.add_argument("--layers", type=numbers, default=[3, 5], help="depths, one dense layer included")
    parser.add_argument("--batches", type=numbers, default=[1, 4, 16, 64])
    parser.add_argument("--prompts", type=numbers, default=[1024, 8192])
    parser.add_argument("--ks", type=numbers, default=[0, 3], help="draft tokens a round; 0: no speculation")
    parser.add_argument("--tokens", type=int, default=256, help="output tokens of a request")
    parser.add_argument("--acceptance", type=float, default=3.0, help="mean tokens a round and sequence")
    parser.add_argument("--set", action="append", default=[], metavar="SETTING=VALUE", help="any other setting")
    parser.add_argument(
        "--profile", type=numbers, metavar="BATCHES", help="of these, GPU time by kernel; with --rank-of, of all"
    )
    parser.add_argument(
        "--masked", type=numbers, default=[0], help="sequences of a batch that a grammar masks, such as 0,1,4,16"
    )
    parser.add_argument(
        "--masked-by", choices=["grammar", "allowed_token_ids"], default="grammar", help="what masks them"
    )
    parser.add_argument(
        "--matches",
        nargs="+",
        default=[],
        metavar="SHARE:LENGTH",
        help="beside the draft alone, with looked-up proposals: such as 0.5:24, half of the text in runs of 24 tokens",
    )
    parser.add_argument(
        "--prompt-steps",
        type=PromptStep.parse,
        nargs="+",
        default=[],
        metavar="ROWS:DECODES:CONTEXT",
        help="instead of rounds, steps with a chunk, captured and eager: such as 256:16:1024 2048:0:0",
    )
    parser.add_argument("--rank-of", type=int, default=1, metavar="N", help="what one of N GPUs runs")
    parser.add_argument("--pause-us", type=float, default=0.0, help="with --rank-of: for each collective's way")
    parser.add_argument("--served", action="store_true", help="through Triton Server instead of in this process")
    parser.add_argument("--tables", type=Path, nargs="+", metavar="JSON", help="only print what these runs measured")
    parser.add_argument("--out", type=Path, help="folder for slice.json and slice.png")
    options = parser.parse_args()
    for text in options.matches:
        MatchScript.parse(text)  # before anything is loaded
    if options.served and (options.rank_of > 1 or options.masked != [0] or options.matches or options.prompt_steps):
        parser.error("--rank-of, --masked, --matches and --prompt-steps run in this process, without --served")
    if options.profile is None:
        options.profile = options.batches if options.rank_of > 1 else []
    return options


def cases(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Every prompt length with every window, batch size and number of masked sequences."""
    for prompt_len in options.prompts:
        for k in options.ks:
            for batch_size in options.batches:
                case = {"batch_size": batch_size, "prompt_len": prompt_len, "num_speculative_tokens": k}
                if k:
                    yield from ({**case, "matches": script} for script in options.matches)
                for num_masked in options.masked:
                    if num_masked <= batch_size:
                        masks = {"num_masked": num_masked, "masked_by": options.masked_by}
                        yield case | masks if num_masked else case
