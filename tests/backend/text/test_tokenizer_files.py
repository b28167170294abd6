"""Tokenizer files: what is read from them, and that each way they can be malformed is named."""

import base64
import json
import os
from pathlib import Path

import pytest

from kimi_backend.errors import CheckpointError
from kimi_backend.text.chat_template import load_chat_template
from kimi_backend.text.tiktoken_files import write_tokenizer
from kimi_backend.text.tiktoken_tokenizer import TiktokenTokenizer
from kimi_backend.text.tokenizer import load_tokenizer
from kimi_backend.text.tokenizer_files import _chat_templates

VOCAB_SIZE = 1024


def test_files_round_trip(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, VOCAB_SIZE)
    tokenizer = load_tokenizer(tmp_path)
    assert isinstance(tokenizer, TiktokenTokenizer)
    first = VOCAB_SIZE - 256
    assert tokenizer.vocab_size == VOCAB_SIZE
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.eos_token_ids) == (first, first + 1, (first + 2,))
    assert len(tokenizer.control_tokens) == 256
    assert tokenizer.control_tokens["<|media_pad|>"] == first + 21
    assert tokenizer.control_tokens[f"<|reserved_token_{first + 100}|>"] == first + 100


def _edit_json(path: Path, change: object) -> None:
    config = json.loads(path.read_text())
    change(config)  # type: ignore[operator]
    path.write_text(json.dumps(config))


def _line(token: bytes, rank: object) -> str:
    return f"{base64.b64encode(token).decode()} {rank}"


BROKEN_RANKS = {
    "one field": (lambda lines: lines.__setitem__(5, "YQ=="), "line 6: 'YQ==' has 1 fields"),
    "not base64": (lambda lines: lines.__setitem__(5, "@@ 5"), "line 6: '@@' is not base64"),
    "rank is a word": (lambda lines: lines.__setitem__(5, _line(b"x", "five")), "line 6: rank 'five' is not a whole"),
    "negative rank": (lambda lines: lines.__setitem__(5, _line(b"\x05", -5)), "line 6: rank '-5' is not a whole"),
    "token twice": (lambda lines: lines.append(_line(b"\x05", 768)), r"line 769: token b'\\x05' is on line 6 already"),
    "rank twice": (lambda lines: lines.append(_line(b"zzzzz", 5)), "line 769: rank 5 is on line 6 already"),
    "a byte missing": (lambda lines: lines.__setitem__(5, _line(b"zzzzz", 5)), r"1 of 256 single bytes .*\(0x05\)"),
    "a gap": (lambda lines: lines.__setitem__(300, _line(b"zzzzz", 900)), "rank 300 is missing"),
    "empty": (lambda lines: lines.clear(), "256 of 256 single bytes"),
}


@pytest.mark.parametrize("case", BROKEN_RANKS)
def test_malformed_ranks_are_named(case: str, tmp_path: Path) -> None:
    change, message = BROKEN_RANKS[case]
    write_tokenizer(tmp_path, VOCAB_SIZE)
    path = tmp_path / "tiktoken.model"
    lines = path.read_text().splitlines()
    change(lines)
    path.write_text("\n".join(lines))
    with pytest.raises(CheckpointError, match=message) as caught:
        load_tokenizer(tmp_path)
    assert str(path) in str(caught.value)


def test_many_problems_are_counted(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, VOCAB_SIZE)
    (tmp_path / "tiktoken.model").write_text("nonsense\n" * 100)
    with pytest.raises(CheckpointError, match=r"line 1:(.|\n)*and 80 more"):
        load_tokenizer(tmp_path)


BROKEN_CONFIGS = {
    "not an object": (lambda c: c.update(added_tokens_decoder=[]), "added_tokens_decoder is a list"),
    "key is a word": (lambda c: c["added_tokens_decoder"].update(x={"content": "y"}), r"\['x'\]: the key must be"),
    "key of 5000 digits": (
        lambda c: c["added_tokens_decoder"].update({"9" * 5000: {"content": "y"}}),
        r"\['9{40}'\]: the key must be a token id",
    ),
    "a lone surrogate": (
        lambda c: c["added_tokens_decoder"].update({"800": {"content": "\ud800"}}),
        r"\['800'\].content is '\\ud800'; a lone surrogate",
    ),
    "no content": (lambda c: c["added_tokens_decoder"].update({"800": {}}), r"\['800'\].content is None"),
    "content twice": (
        lambda c: c["added_tokens_decoder"].update({"800": {"content": "[BOS]"}}),
        r"\['800'\].content '\[BOS\]' also belongs to id 768",
    ),
    "id twice": (
        lambda c: c["added_tokens_decoder"].update({"800": {"content": "x"}, "0800": {"content": "y"}}),
        r"\['0800'\]: id 800 is there twice",
    ),
    "special is a word": (
        lambda c: c["added_tokens_decoder"].update({"800": {"content": "x", "special": "yes"}}),
        "special is 'yes'; true or false",
    ),
    "id of a rank": (
        lambda c: c["added_tokens_decoder"].update({"5": {"content": "x"}}),
        "takes the id of a token in tiktoken.model; allowed: 768 and up",
    ),
    "name of a reserved id": (
        lambda c: c["added_tokens_decoder"].update({"800": {"content": "<|reserved_token_801|>"}}),
        "the name of another id",
    ),
    "unknown bos": (lambda c: c.update(bos_token="<s>"), "bos_token is '<s>', which is not in"),
    "bos is a number": (lambda c: c.update(bos_token=3), "bos_token is 3; a token's text"),
    "template is a number": (lambda c: c.update(chat_template=3), r"chat_template\[0\]: a string"),
}


@pytest.mark.parametrize("case", BROKEN_CONFIGS)
def test_malformed_config_is_named(case: str, tmp_path: Path) -> None:
    change, message = BROKEN_CONFIGS[case]
    write_tokenizer(tmp_path, VOCAB_SIZE)
    path = tmp_path / "tokenizer_config.json"
    _edit_json(path, change)
    with pytest.raises(CheckpointError, match=message) as caught:
        load_tokenizer(tmp_path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [("{", "is not JSON: .*line 1"), ("[]", "holds a list; a JSON object"), (b"\xff\xfe", "byte 0 is not UTF-8")],
)
def test_unreadable_config_is_named(content: str | bytes, message: str, tmp_path: Path) -> None:
    write_tokenizer(tmp_path, VOCAB_SIZE)
    path = tmp_path / "tokenizer_config.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(CheckpointError, match=message):
        load_tokenizer(tmp_path)
    path.unlink()
    with pytest.raises(CheckpointError, match=r"tokenizer_config.json: the file does not exist"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        ({"eos_token_id": [770, 769, 770]}, {}, (770, 769)),
        ({"eos_token_id": 769}, {"eos_token_id": 1}, (769, 1)),
        ({"eos_token_id": [769, 1]}, {"eos_token_id": [1, 2]}, (769, 1, 2)),
        ({}, {"eos_token_id": 771}, (771,)),
        ({}, {"text_config": {"eos_token_id": 772}}, (772,)),
        ({}, {}, (769,)),
        (None, None, (769,)),
    ],
)
def test_what_ends_a_reply(generation: dict | None, config: dict | None, expected: tuple, tmp_path: Path) -> None:
    write_tokenizer(tmp_path, VOCAB_SIZE)
    for name, content in (("generation_config.json", generation), ("config.json", config)):
        (tmp_path / name).write_text(json.dumps(content)) if content is not None else (tmp_path / name).unlink(True)
    assert load_tokenizer(tmp_path).eos_token_ids == expected


@pytest.mark.parametrize("value", [VOCAB_SIZE, -1, "2", [], [1, None], True, 1.0])
def test_bad_end_of_reply_is_named(value: object, tmp_path: Path) -> None:
    write_tokenizer(tmp_path, VOCAB_SIZE)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
    with pytest.raises(
        CheckpointError, match=r"generation_config.json: eos_token_id is .*allowed: an id from 0 to 1023"
    ):
        load_tokenizer(tmp_path)


def test_a_folder_without_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"expected tiktoken.model or tokenizer.json"):
        load_tokenizer(tmp_path)
    with pytest.raises(CheckpointError, match="does not exist"):
        load_tokenizer(tmp_path / "absent")
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="is a file"):
        load_tokenizer(tmp_path / "file")


def test_remote_code_is_never_run(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, VOCAB_SIZE)
    (tmp_path / "tokenization_kimi.py").write_text("raise SystemExit('ran')")
    _edit_json(
        tmp_path / "tokenizer_config.json",
        lambda config: config.update(auto_map={"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]}),
    )
    assert load_tokenizer(tmp_path).decode([97]) == "a"


@pytest.mark.parametrize("name", ["tiktoken.model", "tokenizer_config.json", "generation_config.json"])
def test_a_pipe_among_the_files_does_not_hang(name: str, tmp_path: Path) -> None:
    write_tokenizer(tmp_path, 2048)
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    with pytest.raises(CheckpointError, match="is no regular file"):
        load_tokenizer(tmp_path)


def test_a_pipe_for_a_chat_template_does_not_hang(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, 2048)
    tokenizer = load_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").unlink(missing_ok=True)
    os.mkfifo(tmp_path / "chat_template.jinja")
    with pytest.raises(CheckpointError, match="is no regular file"):
        load_chat_template(tmp_path, tokenizer)


@pytest.mark.parametrize("key", ["999999999999", "16777216"])
def test_an_id_beyond_any_vocabulary_is_refused(key: str, tmp_path: Path) -> None:
    write_tokenizer(tmp_path, 2048)
    config = {"added_tokens_decoder": {key: {"content": "<far>"}}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="a whole number up to 16777215"):
        load_tokenizer(tmp_path)


def test_a_blank_line_among_the_ranks_is_none(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, VOCAB_SIZE)
    path = tmp_path / "tiktoken.model"
    path.write_text("\n  \n".join(path.read_text().splitlines()))
    assert load_tokenizer(tmp_path).decode([97]) == "a"


def test_a_chat_template_may_stand_in_the_config_alone_or_by_name() -> None:
    problems = list[str]()
    assert _chat_templates({}, problems) == {}
    assert _chat_templates({"chat_template": "a"}, problems) == {"default": "a"}
    named = [{"name": "default", "template": "b"}, {"name": "tool_use", "template": "c"}]
    assert _chat_templates({"chat_template": named}, problems) == {"default": "b", "tool_use": "c"}
    assert problems == []
    assert _chat_templates({"chat_template": [*named, {"name": "x"}]}, problems).keys() == {"default", "tool_use"}
    assert problems == ["chat_template[2]: a string, or a list of objects with name and template, is expected"]
