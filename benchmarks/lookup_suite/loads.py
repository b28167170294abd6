"""Three loads made of kimi-nano's held-out files: what an editor completes, an edit that repeats, repeated records."""

import ast
import random
import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from kimi_nano.corpus import SourceFile, distribution_paths, is_held_out, key_hash, load_corpus, stdlib_paths
from kimi_nano.prompts import held_out_prompts

Encode = Callable[[str], list[int]]

COMPLETION_TOKENS = 256
EDIT_TOKENS = (96, 420)
"""Least and most of the function that an edit's prompt holds."""
SHOWN_LINES = 3
"""Lines of the function's second copy: its continuation repeats the rest."""
NUM_RECORDS = 40
LEAST_REPEATED = 16
"""Tokens of the span that a text must repeat to be an edit."""
_NAME = re.compile(r"[A-Za-z_][A-Za-z_0-9]{2,}")


@dataclass(frozen=True, slots=True)
class LoadPrompt:
    """A prompt, and what its right continuation repeats of it."""

    token_ids: list[int]
    span: list[int]
    """Empty where nothing has to be repeated."""


def held_out_files() -> list[SourceFile]:
    """The corpus's held-out files on this machine, in the order of their hash."""
    paths = [path for source in (stdlib_paths(), distribution_paths()) for path in source if is_held_out(path[0])]
    return sorted(load_corpus(paths), key=lambda file: (key_hash(file.key), file.key))


def make_loads(files: list[SourceFile], encode: Encode, count: int) -> dict[str, list[LoadPrompt]]:
    """`count` prompts of each load, or as many as the files give."""
    completions = held_out_prompts(files, encode, count, COMPLETION_TOKENS)
    makers = {"edit": _edits, "records": _records}
    loads = {"completion": [LoadPrompt(prompt.token_ids, []) for prompt in completions]}
    for name, make in makers.items():
        loads[name] = []
        for file in files:
            loads[name] += list(make(file, encode))[: count - len(loads[name])]
    return loads


def _edits(file: SourceFile, encode: Encode) -> Iterator[LoadPrompt]:
    """A function, and the beginning of the same function once more."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tree = ast.parse(file.text)
    lines = file.text.splitlines(keepends=True)
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    for node in functions[:6]:
        body = lines[node.lineno - 1 : node.end_lineno]
        if len(body) <= SHOWN_LINES + 4:
            continue
        text, shown = "".join(body).rstrip() + "\n", "".join(body[:SHOWN_LINES])
        if EDIT_TOKENS[0] <= len(encode(text)) <= EDIT_TOKENS[1]:
            prompt = f"# Before\n{text}\n\n# After: logging was added, nothing else has changed\n{shown}"
            yield LoadPrompt(encode(prompt), encode(text[len(shown) :]))


def _records(file: SourceFile, encode: Encode) -> Iterator[LoadPrompt]:
    """Records of the same keys, with values that come again, such as a table's rows or a tool's results."""
    names = list(dict.fromkeys(_NAME.findall(file.text)))
    if len(names) < 24:
        return
    rng = random.Random(key_hash(file.key))
    keys, kinds = rng.sample(names, 4), rng.sample(names, 6)
    rows = []
    for number in range(NUM_RECORDS):
        values = [rng.choice(kinds), rng.choice(kinds), str(number), rng.choice(names)]
        rows.append("    {" + ", ".join(f'"{k}": "{v}"' for k, v in zip(keys, values, strict=True)) + "},\n")
    token_ids = encode("RECORDS = [\n" + "".join(rows))
    yield LoadPrompt(token_ids[-1400:], [])


def longest_repeated(span: list[int], tokens: list[int]) -> int:
    """Tokens of the longest run of `tokens` that stands in `span`."""
    best, lengths = 0, [0] * (len(span) + 1)
    for token in tokens:
        before = 0
        for place, other in enumerate(span, 1):
            before, lengths[place] = lengths[place], before + 1 if other == token else 0
            best = max(best, lengths[place])
    return best
