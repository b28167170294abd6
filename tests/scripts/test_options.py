"""Programs that are started by hand declare the options that they read and that their usage names."""

import argparse
import ast
import inspect
import re
from pathlib import Path

import pytest

import kimi_nano.__main__ as kimi_nano_main

ROOT = Path(__file__).parents[2]
FILES = [path for folder in ("scripts", "demo/kimi_nano") for path in sorted((ROOT / folder).rglob("*.py"))]
PROGRAMS = [path for path in FILES if "add_argument(" in path.read_text()]
STARTED = 'if __name__ == "__main__":\n'
NAMESPACE = set(dir(argparse.Namespace()))


def declared(tree: ast.AST) -> set[str]:
    """The names under which options are read."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)]
    names = set()
    for call in calls:
        if call.func.attr == "add_argument":  # type: ignore[attr-defined]
            given = [word.value for word in call.args if isinstance(word, ast.Constant)]
            dest = [word.value.value for word in call.keywords if word.arg == "dest"]  # type: ignore[attr-defined]
            names.add(dest[0] if dest else max(given, key=len).lstrip("-").replace("-", "_"))
        if call.func.attr in ("add_subparsers", "set_defaults"):  # type: ignore[attr-defined]
            names |= {word.value.value if word.arg == "dest" else word.arg for word in call.keywords}  # type: ignore[attr-defined,misc]
    return names


def is_namespace(annotation: ast.expr | None) -> bool:
    return annotation is not None and ast.unparse(annotation).endswith("Namespace")


def read(tree: ast.AST) -> set[str]:
    """The attributes that are read of what `parse_args` returns, or a parameter that is said to be a Namespace."""
    holders = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and ".parse_args(" in ast.unparse(node.value):
            holders |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        if isinstance(node, ast.arg) and is_namespace(node.annotation):
            holders.add(node.arg)
    held = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)]
    return {node.attr for node in held if node.value.id in holders}  # type: ignore[attr-defined]


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: str(path.relative_to(ROOT)))
def test_options_that_are_read_or_named_are_declared(path: Path) -> None:
    tree = ast.parse(path.read_text())
    names = declared(tree)
    assert read(tree) - names - NAMESPACE == set()
    usage = "".join(re.findall(rf"python \S*{path.stem}\.py (.*)", ast.get_docstring(tree) or ""))
    assert {name.replace("-", "_") for name in re.findall(r"--([a-z][a-z-]*)", usage)} - names == set()


@pytest.mark.parametrize("name", kimi_nano_main._COMMANDS)
def test_each_command_of_kimi_nano_reads_the_options_that_it_has(name: str) -> None:
    (commands,) = kimi_nano_main._parser()._subparsers._group_actions  # type: ignore[union-attr]
    has = {action.dest for action in commands.choices[name]._actions} - {"help"}  # type: ignore[index, call-overload]
    source = inspect.getsource(kimi_nano_main._COMMANDS[name])
    if "_held_out_prompts(args)" in source:
        source += inspect.getsource(kimi_nano_main._held_out_prompts)
    assert set(re.findall(r"\bargs\.(\w+)", source)) == has


def test_a_program_that_is_started_calls_its_main() -> None:
    started = [path for path in [*FILES, *sorted((ROOT / "benchmarks").rglob("*.py"))] if STARTED in path.read_text()]
    ends = {path.name: path.read_text().rpartition(STARTED)[2].strip() for path in started}
    assert len(ends) > 40
    assert {name for name, end in ends.items() if not re.search(r"\bmain\(.*\)$", end, re.DOTALL)} == set()


def test_an_option_that_nobody_declares_is_found() -> None:
    tree = ast.parse("o = p.parse_args()\nprint(o.json, o.out_folder)\np.add_argument('-o', '--out-folder')")
    assert (read(tree), declared(tree)) == ({"json", "out_folder"}, {"out_folder"})
