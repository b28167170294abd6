"""`kimi count-tokens` counts texts, token ids and conversations."""

import json
from collections import Counter
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kimi_backend.checkpoint.token_counts import TokenCounts
from kimi_backend.cli.main import app
from kimi_backend.errors import InvalidRequestError
from kimi_backend.text.chat_template import load_chat_template
from kimi_backend.text.text_files import read_documents
from kimi_backend.text.tokenizer import load_tokenizer

NANO = Path(__file__).parents[3] / "demo" / "kimi-nano"
TEXT = "def f(x):\n    return x + 1\n"
MESSAGES = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "x = 1"}]


def count(tmp_path: Path, *files: Path) -> TokenCounts:
    out = tmp_path / "counts.json"
    arguments = ["count-tokens", str(NANO), *map(str, files), "--out", str(out)]
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert "of 4,096 different ones" in result.output
    return TokenCounts.read(out)


def test_every_kind_of_document_is_counted(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(TEXT)
    lines = [{"text": TEXT}, {"token_ids": [7, 7, 4095]}, {"messages": MESSAGES}]
    (tmp_path / "b.jsonl").write_text("\n\n".join(map(json.dumps, lines)))
    tokenizer = load_tokenizer(NANO)
    template = load_chat_template(NANO, tokenizer)
    assert template is not None
    expected = Counter(tokenizer.encode(TEXT) * 2 + [tokenizer.eos_token_ids[0]] * 2 + [7, 7, 4095])
    expected.update(template.encode(MESSAGES, add_generation_prompt=False))
    counts = count(tmp_path, tmp_path / "a.py", tmp_path / "b.jsonl")
    assert dict(zip(counts.token_ids, counts.counts, strict=True)) == dict(expected)
    assert counts.vocab_size == 4096


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("nonsense", r"wrong\.jsonl:1: not valid JSON"),
        ('{"text": "a"}\n{"prompt": "a"}', r"wrong\.jsonl:2: .* text, token_ids or messages is needed"),
        ('{"text": "a", "token_ids": [1]}', r"wrong\.jsonl:1"),
        ('{"text": 3}', r"wrong\.jsonl:1"),
        ('{"token_ids": [1, -1]}', r"wrong\.jsonl:1"),
        ('{"token_ids": [99999]}', r"wrong\.jsonl:1"),
        ('{"messages": [{"role": 3}]}', r"wrong\.jsonl:1: "),
        ("", "no tokens in the files given"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "wrong.jsonl").write_text(content)
    with pytest.raises(InvalidRequestError, match=message):
        count(tmp_path, tmp_path / "wrong.jsonl")


def test_a_file_that_is_no_text_is_named(tmp_path: Path) -> None:
    (tmp_path / "picture.bin").write_bytes(b"a\xff")
    with pytest.raises(InvalidRequestError, match=r"picture\.bin: byte 1 is not UTF-8"):
        count(tmp_path, tmp_path / "picture.bin")


def test_messages_need_a_template_and_a_file_must_be_there(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(NANO)
    (tmp_path / "chat.jsonl").write_text(json.dumps({"messages": MESSAGES}))
    with pytest.raises(InvalidRequestError, match=r"chat\.jsonl:1: messages given, but .* no chat template"):
        list(read_documents(tmp_path / "chat.jsonl", tokenizer, None))
    with pytest.raises(InvalidRequestError, match=r"none\.txt: No such file"):
        list(read_documents(tmp_path / "none.txt", tokenizer, None))
