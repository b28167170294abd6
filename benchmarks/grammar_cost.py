"""Time what a grammar costs the engine's thread: masks of a row and of a window, and going on behind a token.

    PYTHONPATH=kernels:backend:benchmarks python benchmarks/grammar_cost.py

kimi-nano's vocabulary, and a made-up one of Kimi's size. Microseconds of processor time, median and 90th percentile.
"""

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kimi_backend.grammar.compiler import GrammarCompiler
from kimi_backend.grammar.window import SequenceGrammar
from kimi_backend.text.tokenizer import load_tokenizer
from kimi_backend.types.grammar import Form, Grammar, JsonSchema
from slice_suite.grammars import GRAMMAR, MadeUpTokenizer

NANO = Path(__file__).resolve().parents[1] / "demo/kimi-nano"
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "size": {"type": "integer"},
        "tags": {"items": {"type": "string"}, "type": "array"},
    },
    "required": ["name", "size", "tags"],
}
TEXT = '{"name": "a small thing of some use", "size": 1234, "tags": ["old", "blue and green"]}'
KIMI_VOCABULARY = 163_840
REPEATS = 20


def main() -> None:
    nano = load_tokenizer(NANO)
    for name, tokenizer, form, tokens in (
        ("kimi-nano, 4,096", nano, JsonSchema(json.dumps(SCHEMA)), nano.encode(TEXT)),
        ("made up, 163,840", MadeUpTokenizer(KIMI_VOCABULARY), GRAMMAR.form, list(range(1000, 1064))),
    ):
        measure(name, tokenizer, form, tokens)


def measure(name: str, tokenizer: Any, form: Form, tokens: list[int]) -> None:
    """Print one vocabulary's lines."""
    compiler, grammar = GrammarCompiler(tokenizer), Grammar(form, "benchmark")
    start = time.perf_counter()
    compiled = compiler.request(grammar, tokenizer.vocab_size).result()
    print(f"{name}: first grammar compiled after {time.perf_counter() - start:.2f} s, its process's start included")
    times: dict[str, list[float]] = {"a row's mask": [], "a window of 4 rows": [], "going on behind a token": []}
    for _ in range(REPEATS):
        sequence = SequenceGrammar.of(grammar, compiled, frozenset())
        for place, token_id in enumerate(tokens):
            proposals = tokens[place : place + 3]
            times["a row's mask"].append(timed(lambda s=sequence: s.look_ahead([], 0)))
            times["a window of 4 rows"].append(timed(lambda s=sequence, p=proposals: s.look_ahead(p, 3)))
            times["going on behind a token"].append(timed(lambda s=sequence, t=token_id: s.advance([t])))
    for what, found in times.items():
        tenths = statistics.quantiles(found, n=10)
        print(f"  {what:24s} {statistics.median(found):7.1f} (p90 {tenths[-1]:.1f})")
    compiler.close()


def timed(act: Callable[[], object]) -> float:
    """Microseconds."""
    start = time.thread_time_ns()
    act()
    return (time.thread_time_ns() - start) / 1e3


if __name__ == "__main__":
    main()
