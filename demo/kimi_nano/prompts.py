"""Prompts for measurements: held-out files cut inside the body of a random function."""

import ast
import random
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from kimi_nano.corpus import SourceFile, key_hash

MIN_PROMPT_TOKENS = 32
MIN_BODY_LINES = 6


@dataclass(frozen=True, slots=True)
class Prompt:
    """The end of a file's text before the cut."""

    key: str
    token_ids: list[int]


def cut_in_function(text: str, rng: random.Random) -> str | None:
    """The text up to a random line inside a random function's body; None if it has no function of enough lines.

    The cut is before a statement that is neither the first of the body nor its docstring.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # invalid escapes in old sources
        tree = ast.parse(text)
    lines: list[list[int]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            starts = sorted({inner.lineno for inner in _statements(node.body[1:])})
            length = (node.end_lineno or node.lineno) - node.body[0].lineno
            if starts and length >= MIN_BODY_LINES:
                lines.append(starts)
    if not lines:
        return None
    line = rng.choice(rng.choice(lines))
    return "".join(text.splitlines(keepends=True)[: line - 1])


def _statements(body: Iterable[ast.stmt]) -> Iterable[ast.stmt]:
    for statement in body:
        for node in ast.walk(statement):
            if isinstance(node, ast.stmt):
                yield node


def held_out_prompts(
    files: Iterable[SourceFile], encode: Callable[[str], list[int]], count: int, max_tokens: int
) -> list[Prompt]:
    """The first `count` held-out files, in the order of their hash, that can be cut.

    Args:
        encode: text -> token ids.
        max_tokens: what is kept of a prompt, from its end.
    """
    prompts: list[Prompt] = []
    for file in sorted((f for f in files if f.is_held_out), key=lambda file: (key_hash(file.key), file.key)):
        text = cut_in_function(file.text, random.Random(key_hash(file.key)))
        token_ids = encode(text) if text else []
        if len(token_ids) >= MIN_PROMPT_TOKENS:
            prompts.append(Prompt(file.key, token_ids[-max_tokens:]))
        if len(prompts) == count:
            break
    return prompts
