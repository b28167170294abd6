"""The files that are in the corpus, and those held out."""

from email.message import Message
from pathlib import Path
from typing import Any

import pytest

from kimi_nano.corpus import (
    HELD_OUT_ONE_IN,
    SourceFile,
    is_held_out,
    load_corpus,
    permissive_licence,
    read_source,
    stdlib_paths,
    strip_head_comments,
)
from kimi_nano.dataset import load, prepare
from support.nano_corpus import made_up_files

CODE = "import os\n\n\ndef size(path):\n    return os.stat(path).st_size\n"


def metadata(**fields: Any) -> Any:
    message = Message()
    for name, values in fields.items():
        for value in values if isinstance(values, list) else [values]:
            message[name.replace("_", "-")] = value
    return message


@pytest.mark.parametrize(
    ("fields", "licence"),
    [
        ({"License_Expression": "MIT"}, "MIT"),
        ({"License_Expression": "Apache-2.0 AND BSD-3-Clause"}, "Apache-2.0 AND BSD-3-Clause"),
        ({"License": "Apache License, Version 2.0"}, "Apache-2.0"),
        ({"License": "some text", "Classifier": "License :: OSI Approved :: BSD License"}, "BSD"),
        ({"License_Expression": "MPL-2.0"}, None),
        ({"License_Expression": "MIT AND GPL-3.0-only"}, None),
        ({"License_Expression": "GPL-3.0-only", "Classifier": "License :: OSI Approved :: MIT License"}, None),
        ({"Classifier": ["License :: OSI Approved :: MIT License", "License :: Other/Proprietary License"]}, None),
        ({}, None),
    ],
)
def test_only_permissive_licences_pass(fields: dict[str, Any], licence: str | None) -> None:
    assert permissive_licence(metadata(**fields)) == licence


def test_the_choice_of_held_out_files_depends_on_the_key_alone() -> None:
    keys = [f"package/module_{number}.py" for number in range(24_000)]
    share = sum(map(is_held_out, keys)) / len(keys)
    assert share == pytest.approx(1 / HELD_OUT_ONE_IN, rel=0.1)
    assert is_held_out("stdlib/json/decoder.py") == SourceFile("stdlib/json/decoder.py", "PSF-2.0", "x").is_held_out


def test_keys_do_not_name_the_machine() -> None:
    keys = {key for key, _, _ in stdlib_paths()}
    assert "stdlib/json/decoder.py" in keys
    assert not any("site-packages" in key or key.startswith("/") or "/test/" in key for key in keys)


def test_the_notice_at_a_files_head_goes() -> None:
    assert strip_head_comments("#!/usr/bin/env python\n# Copyright.\n\n" + CODE) == CODE


@pytest.mark.parametrize(
    "content",
    [b"def f(:\n" * 100, b"x = 1\n", b"x = '\xff'\n" * 100, b"x = '" + b"a" * 2000 + b"'\n"],
    ids=["not Python", "too short", "not UTF-8", "a very long line"],
)
def test_what_is_no_source_is_left_out(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "odd.py").write_bytes(content)
    assert read_source(tmp_path / "odd.py") is None


def test_copies_are_left_out(tmp_path: Path) -> None:
    texts = [f"def function_{i}(argument):\n    return argument * {i} + {i * i}\n" for i in range(60)]
    sources = {"a.py": texts[:40], "copy.py": [*texts[:39], "# changed a little\n"], "b.py": texts[40:]}
    paths = []
    for name, lines in sources.items():
        (tmp_path / name).write_text("".join(lines))
        paths.append((f"p/{name}", "MIT", tmp_path / name))
    kept = {file.key for file in load_corpus(paths)}
    assert "p/b.py" in kept
    assert len(kept) == 2


def test_held_out_text_reaches_neither_tokenizer_nor_training(tmp_path: Path) -> None:
    """A word that only held-out files hold is no token, and training has not a single one of its files."""
    secret = "zyxwvzyxwv"
    files = [
        SourceFile(file.key, file.licence, file.text.replace("value", secret) if file.is_held_out else file.text)
        for file in made_up_files(120)
    ]
    held_out = {file.key for file in files if file.is_held_out}
    assert held_out
    prepare(tmp_path, files, 700, 256, 3)
    dataset = load(tmp_path)
    assert set(dataset.held_out) == held_out
    assert {prompt.key for prompt in dataset.prompts} <= held_out
    from kimi_backend.text.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(tmp_path / "tokenizer")
    text = tokenizer.decode(dataset.train.tolist(), skip_special=True)
    assert secret not in text
    assert sum(text.count(file.text) for file in files if not file.is_held_out) >= len(files) - len(held_out)
    assert not any(b"zyx" in tokenizer.token_bytes(token) for token in range(tokenizer.vocab_size))
