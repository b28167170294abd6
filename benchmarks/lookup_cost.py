"""Measures what looking up costs the engine's thread: processor time a committed token, and memory.

    PYTHONPATH=backend:kernels python benchmarks/lookup_cost.py [--sequences 64 256] [--tokens 32768] [--json OUT]

Each round every sequence looks for a match, all matches are judged and chosen from together, and tokens are committed.
Texts: `fresh`, where nothing comes again, three tokens a round; `copied`, which repeats a span of 7,000 tokens, eight a
round, as seven are proposed and kept; `source`, Python's own library in kimi-nano's tokens, whose searches look at many
places, three a round.
"""

import argparse
import json
import statistics
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from kimi_backend.spec_decode.controller import SpeculationController
from kimi_backend.spec_decode.lookup import LookupMemory, SequenceLookup
from kimi_backend.spec_decode.lookup_choice import Candidate, LookupChooser
from kimi_backend.spec_decode.policy import FixedPolicy
from kimi_backend.spec_decode.row_choice import Batch
from kimi_backend.text.tokenizer import load_tokenizer
from kimi_backend.types.plan import Int32Array

NANO = Path(__file__).parents[1] / "demo" / "kimi-nano"
ROUNDS, K = 60, 7


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--tokens", type=int, default=32_768)
    parser.add_argument("--min-match", type=int, default=4)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    report = {"indexing": [indexing(count, args.min_match) for count in (8_192, 65_536)], "rounds": []}
    for entry in report["indexing"]:
        print(json.dumps(entry), flush=True)
    for count in args.sequences:
        for kind, make, a_round in (("fresh", fresh, 3), ("copied", copied, K + 1), ("source", source, 3)):
            entry = {"text": kind, "sequences": count, **measure(list(make(count, args.tokens)), a_round, args)}
            report["rounds"].append(entry)
            print(json.dumps(entry), flush=True)
    if args.json:
        args.json.write_text(json.dumps(report, indent=1))


def indexing(count: int, min_match: int) -> dict[str, float]:
    """Milliseconds to index a prompt, on the thread of the request's caller."""
    (tokens,) = fresh(1, count)
    times = []
    for _ in range(7):
        start = time.process_time()
        lookup = SequenceLookup.of(tokens, min_match, LookupMemory(1 << 30))
        times.append(1e3 * (time.process_time() - start))
        assert lookup is not None
    return {"prompt_tokens": count, "ms": round(statistics.median(times), 2)}


def measure(texts: list[Int32Array], tokens_a_round: int, args: argparse.Namespace) -> dict[str, float]:
    """Rounds of all texts together; the index is full but for what they commit."""
    memory, chooser, policy = LookupMemory(1 << 40), LookupChooser(), FixedPolicy()
    known = args.tokens - ROUNDS * tokens_a_round
    lookups = [SequenceLookup.of(text[:known], args.min_match, memory) for text in texts]
    controllers = [SpeculationController(K) for _ in texts]
    batch, num_found, times = Batch(len(texts), 0, known * len(texts), is_drafting=False, overlaps_next=False), 0, []
    for _ in range(ROUNDS):
        start = time.process_time()
        candidates = []
        for lookup, text, controller in zip(lookups, texts, controllers, strict=True):
            assert lookup is not None
            match = lookup.find(text[:known], chooser.pools)
            if match is not None:
                candidates.append(Candidate(lookup, match, controller, 0, K))
        if candidates:
            chooser.choose(candidates, policy, batch)
        end = known + tokens_a_round
        for lookup, text in zip(lookups, texts, strict=True):
            assert lookup is not None
            lookup.extend(text[known:end].tolist(), text[:end])
        times.append(time.process_time() - start)
        known, num_found = end, num_found + len(candidates)
    return {
        "us_a_token": round(1e6 * statistics.median(times) / (tokens_a_round * len(texts)), 2),
        "ms_a_round": round(1e3 * statistics.median(times), 2),
        "matches": round(num_found / (ROUNDS * len(texts)), 3),
        "bytes_a_token": round(memory.num_bytes / (known * len(texts)), 1),
        "mib": round(memory.num_bytes / (1 << 20), 1),
    }


def fresh(count: int, length: int) -> Iterator[Int32Array]:
    for seed in range(count):
        yield np.random.default_rng(seed).integers(0, 163_840, length).astype(np.int32)


def copied(count: int, length: int) -> Iterator[Int32Array]:
    for text in fresh(count, 7_000):
        yield np.resize(text, length)


def source(count: int, length: int) -> Iterator[Int32Array]:
    """Each from another place of one long text."""
    encode = load_tokenizer(str(NANO)).encode
    tokens: list[int] = []
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        tokens += encode(path.read_text(errors="ignore"))
        if len(tokens) > 20 * length:
            break
    text = np.array(tokens, np.int32)
    for start in np.linspace(0, len(text) - length, count).astype(int):
        yield text[start : start + length].copy()


if __name__ == "__main__":
    main()
