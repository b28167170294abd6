"""Everything that the documents point at exists: files, headings, and the options of commands."""

import functools
import re
import subprocess
from pathlib import Path
from urllib.parse import unquote

import pytest
import typer.main

from kimi_backend.cli.main import app

ROOT = Path(__file__).resolve().parents[2]
_LISTED = subprocess.run(["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
DOCUMENTS = sorted(path for path in _LISTED.split() if (ROOT / path).exists())

LINK = re.compile(r"!?\[[^\]]*\]\(([^()\s]+)\)")
FENCE = re.compile(r"^```.*?^```", re.M | re.S)
FOLDERS = "backend|benchmarks|client|demo|docker|docs|kernels|model_repository|scripts|tests"
PATH = re.compile(rf"`((?:{FOLDERS})/[\w./-]+)`")
COMMAND = re.compile(r"(?:^|[\s`/$(])kimi ((?:[a-z]+-)?[a-z]+)((?: (?![|&#])[^\s`|&;)]+)*)")


@functools.cache
def text_of(document):
    return (ROOT / document).read_text()


@functools.cache
def anchors_of(document):
    """The anchors that GitHub makes of the headings; a repeated one gets a number."""
    anchors, seen = set(), {}
    for heading in re.findall(r"^#+ +(.+?) *$", FENCE.sub("", text_of(document)), re.M):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "")
        slug = re.sub(r"[^\w\- ]", "", plain.lower()).replace(" ", "-")
        count = seen[slug] = seen.get(slug, -1) + 1
        anchors.add(f"{slug}-{count}" if count else slug)
    return anchors


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_lead_somewhere(document):
    wrong = []  # a folder is a link for a code host, none for the site
    for link in LINK.findall(FENCE.sub("", text_of(document))):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = unquote(link).partition("#")
        target = (ROOT / document).parent / path if path else ROOT / document
        if not target.is_file() or (anchor and anchor not in anchors_of(str(target.resolve().relative_to(ROOT)))):
            wrong.append(link)
    assert wrong == []


@functools.cache
def functions_of_tests():
    """The names of all test functions, by their file's name."""
    files = {}
    for file in (ROOT / "tests").rglob("test_*.py"):
        files.setdefault(file.name, set()).update(re.findall(r"^def (test_\w+)", file.read_text(), re.M))
    return files


@pytest.mark.parametrize("document", DOCUMENTS)
def test_tests_that_are_named_exist(document):
    named = re.findall(r"(test_\w+\.py)::(test_\w+)", text_of(document))
    assert [f"{file}::{test}" for file, test in named if test not in functions_of_tests().get(file, ())] == []


@pytest.mark.parametrize("document", DOCUMENTS)
def test_files_that_are_named_exist(document):
    """They stand in backticks, from the repository's root or from the document's folder."""
    named = {path.rstrip(".") for path in PATH.findall(text_of(document))}
    there = {path for path in named if (ROOT / path).exists() or ((ROOT / document).parent / path).exists()}
    assert named - there == set()


def _commands():
    group = typer.main.get_command(app)
    return {
        name: {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
        for name, command in group.commands.items()
    }


@pytest.mark.parametrize("document", DOCUMENTS)
def test_commands_have_the_options_that_are_named(document):
    commands, wrong = _commands(), []
    for name, rest in COMMAND.findall(text_of(document)):
        if name not in commands:
            continue  # a sentence, such as "kimi serve" in a list of words
        options = {word.partition("=")[0] for word in rest.split() if re.match(r"--?[a-z]", word)}
        wrong += [f"kimi {name} {option}" for option in options - commands[name]]
    assert wrong == []


def test_each_command_is_named_in_a_document():
    named = {name for document in DOCUMENTS for name, _ in COMMAND.findall(text_of(document))}
    assert set(_commands()) <= named
