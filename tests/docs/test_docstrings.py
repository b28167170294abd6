"""Docstrings say what they are about: none begins with a word that leaves the subject out."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("backend", "benchmarks", "client", "demo", "docker", "kernels", "model_repository", "scripts", "tests")
FRAGMENTS = re.compile(
    r"(Of|Whether|Who|As|Likewise|Where|What|Which|Whose|Why|When|While|Until|So|Not|Than|Also|After|At|Before|Behind"
    r"|Beside|By|For|From|How|However|In|On|Over|To|Up|With|Without)\b"
)
"""Words that begin no docstring: what such a one is about would be left to its reader."""


def docstrings(tree: ast.AST) -> Iterator[str]:
    """Those of modules, classes and functions, and those below fields and constants."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else []:
            value = statement.value if isinstance(statement, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield value.value.strip()


def fragments(folder: Path) -> list[str]:
    """The docstrings below a folder that begin with one of `FRAGMENTS`, with their files."""
    found = []
    for file in sorted(folder.rglob("*.py")):
        for text in docstrings(ast.parse(file.read_text())):
            if FRAGMENTS.match(text):
                found.append(f"{file.relative_to(ROOT)}: {text.splitlines()[0]}")
    return found


def test_docstrings_begin_with_their_subject_or_a_verb() -> None:
    assert [text for name in FOLDERS for text in fragments(ROOT / name)] == []


def test_a_fragment_is_found(tmp_path: Path) -> None:
    source = '"""A module."""\nx = 1\n"""Of x."""\ndef f():\n    """What it does."""\n'
    assert [text.split()[0] for text in docstrings(ast.parse(source))] == ["A", "Of", "What"]
