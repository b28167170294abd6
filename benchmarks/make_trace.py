"""Writes a made-up trace in Mooncake's form for `kimi bench --trace`, for who has no recorded one.

    python benchmarks/make_trace.py trace.jsonl --requests 500 --seconds 100 --input 200 --output 20 --block 16

Arrivals are Poisson, lengths log-normal. A share of the requests begins with one of a few long prefixes (system
prompts, documents), equal hash ids; another share are sessions of several turns. With --text each line carries Python
of this project as `text_input` in place of lengths and ids, so that two load generators send the very same prompts.
"""

import argparse
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SOURCES = Path(__file__).parents[1] / "backend/kimi_backend"
CHARACTERS_A_TOKEN = 3


def length(source: random.Random, mean: int) -> int:
    return max(1, round(mean * source.lognormvariate(-0.18, 0.6)))


def arrivals(source: random.Random, number: int, seconds: float) -> Iterator[float]:
    """Milliseconds."""
    yield from sorted(1e3 * source.uniform(0, seconds) for _ in range(number))


def lines(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    source = random.Random(args.seed)
    fresh = iter(range(10**6, 10**9))
    prefixes = [[100 * i + j for j in range(max(1, args.input // args.block // 2))] for i in range(args.prefixes)]
    left = args.requests
    for timestamp in arrivals(source, args.requests, args.seconds):
        if left <= 0:
            return
        turns = min(left, args.turns) if source.random() < args.session_share / max(args.turns, 1) else 1
        left -= turns
        input_length = length(source, args.input)
        prefix = source.choice(prefixes) if source.random() < args.prefix_share else []
        num_blocks = -(-input_length // args.block)
        entry = {
            "timestamp": round(timestamp),
            "input_length": input_length,
            "output_length": length(source, args.output),
            "hash_ids": (prefix + [next(fresh) for _ in range(num_blocks)])[:num_blocks],
        }
        if turns == 1:
            yield entry
            continue
        yield {"session_id": f"session-{timestamp:.0f}-{left}", **entry}
        for _ in range(turns - 1):
            yield {
                "session_id": f"session-{timestamp:.0f}-{left}",
                "delay": round(source.expovariate(1 / args.think_ms)),
                "input_length": max(1, length(source, args.input // 8)),
                "output_length": length(source, args.output),
            }


def with_text(entry: dict[str, Any], text: str, source: random.Random) -> dict[str, Any]:
    size = CHARACTERS_A_TOKEN * entry["input_length"]
    at = source.randrange(len(text) - size)
    return {name: entry[name] for name in ("timestamp", "output_length")} | {"text_input": text[at : at + size]}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--seconds", type=float, default=100.0)
    parser.add_argument("--input", type=int, default=200, help="mean prompt tokens")
    parser.add_argument("--output", type=int, default=20, help="mean output tokens")
    parser.add_argument("--block", type=int, default=16, help="tokens that a hash id stands for")
    parser.add_argument("--prefixes", type=int, default=8)
    parser.add_argument("--prefix-share", type=float, default=0.5)
    parser.add_argument("--session-share", type=float, default=0.3, help="of the requests")
    parser.add_argument("--turns", type=int, default=3, help="of a session")
    parser.add_argument("--think-ms", type=float, default=1000.0, help="mean time between turns")
    parser.add_argument("--text", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.text:
        args.session_share = 0.0
        text = "\n\n".join(path.read_text() for path in sorted(SOURCES.rglob("*.py")))
        entries = [with_text(entry, text, random.Random(number)) for number, entry in enumerate(lines(args))]
    else:
        entries = list(lines(args))
    args.out.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    print(f"{args.out}: {len(entries)} requests")


if __name__ == "__main__":
    main()
