"""tokenizer.json through the tokenizers library, with control tokens kept out of plain text."""

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings

from kimi_backend.errors import CheckpointError
from kimi_backend.text.hf_tokenizer import HfTokenizer, _byte_fallback_bytes, byte_level_bytes
from kimi_backend.text.tokenizer import load_tokenizer
from support.tiny_tokenizers import (
    byte_level_hf_tokenizer,
    sentencepiece_hf_tokenizer,
    texts,
    with_added_tokens,
    wordpiece_hf_tokenizer,
)


@given(text=texts())
@settings(max_examples=200)
def test_byte_level_text_survives(text: str) -> None:
    tokenizer = byte_level_hf_tokenizer()
    token_ids = tokenizer.encode(text)
    assert tokenizer.decode(token_ids) == text
    assert not set(token_ids) & set(tokenizer.control_tokens.values())


@given(text=texts())
@settings(max_examples=100)
def test_plain_text_is_encoded_as_the_library_does(text: str) -> None:
    tokenizer = byte_level_hf_tokenizer()
    library = tokenizer._full
    if not any(content in text for content in tokenizer.control_tokens):
        assert tokenizer.encode(text) == library.encode(text, add_special_tokens=False).ids
        assert tokenizer.encode(text, allow_special=True) == library.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("make", [byte_level_hf_tokenizer, sentencepiece_hf_tokenizer, wordpiece_hf_tokenizer])
def test_control_tokens_only_on_request(make: Any) -> None:
    tokenizer = make()
    end, think = tokenizer.control_tokens["<|end|>"], tokenizer.control_tokens["<think>"]
    assert end not in tokenizer.encode("a<|end|><think>")
    assert think not in tokenizer.encode("a<|end|><think>")
    token_ids = tokenizer.encode("a<|end|>a<think>", allow_special=True)
    assert [token_id for token_id in token_ids if token_id in (end, think)] == [end, think]
    assert tokenizer.is_special(end)
    assert not tokenizer.is_special(think)


def test_runs_of_space_that_a_file_adds_as_tokens_are_ordinary_text() -> None:
    tokenizer = byte_level_hf_tokenizer()
    assert "\n\n\n" not in tokenizer.control_tokens
    assert len(tokenizer.encode("a\n\n\na")) == 3


def test_a_normaliser_cannot_make_a_control_token() -> None:
    vocab = {char: index for index, char in enumerate("<|end>a")}
    library = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[], unk_token="a"))
    library.normalizer = tokenizers.normalizers.NFKC()
    library.add_tokens([tokenizers.AddedToken("<|end|>", normalized=True)])
    lookalike = "＜｜end｜＞"  # noqa: RUF001
    definition = json.loads(library.to_str())
    assert library.encode(lookalike).ids == [library.token_to_id("<|end|>")]
    tokenizer = HfTokenizer(definition, {})
    assert tokenizer.control_tokens["<|end|>"] not in tokenizer.encode(lookalike, allow_special=True)


def test_byte_alphabet_is_the_library_s() -> None:
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    assert sorted(byte_level_bytes(char) for char in alphabet) == [bytes([value]) for value in range(256)]
    pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    for value in range(128):
        (piece, _), *_ = pre_tokenizer.pre_tokenize_str(chr(value))
        assert byte_level_bytes(piece) == bytes([value])


def test_sentencepiece_bytes_and_spaces() -> None:
    tokenizer = sentencepiece_hf_tokenizer()
    assert tokenizer.is_byte_level
    assert tokenizer.decode(tokenizer.encode(" ab 😀中")) == " ab 😀中"


def test_wordpiece_decode_is_the_library_s() -> None:
    tokenizer = wordpiece_hf_tokenizer()
    assert not tokenizer.is_byte_level
    assert tokenizer.decode(tokenizer.encode("unaffable hello.")) == "unaffable hello ."
    with pytest.raises(ValueError, match="-1 is negative"):
        tokenizer.decode([-1])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    library = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={"a": 0, "b": 1, "ab": 2}, merges=[("a", "b")]))
    library.decoder = tokenizers.decoders.ByteLevel()
    (tmp_path / "tokenizer.json").write_text(json.dumps(with_added_tokens(library)))
    return tmp_path


def test_loads_from_files(folder: Path) -> None:
    tokenizer = load_tokenizer(folder)
    assert (tokenizer.encode("abab"), tokenizer.eos_token_ids, tokenizer.bos_token_id) == ([2, 2], (), None)
    names = {"bos_token": {"content": "<s>"}, "eos_token": "<|end|>", "pad_token": None}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    tokenizer = load_tokenizer(folder)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.eos_token_ids) == (3, 4, (4,))
    (folder / "tiktoken.model").write_text("")
    with pytest.raises(CheckpointError, match=r"tiktoken.model"):
        load_tokenizer(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.update(added_tokens={}), None),
        (lambda d: d.update(added_tokens={"a": 1}), "added_tokens is a dict"),
        (lambda d: d.update(added_tokens=[{"id": "x", "content": "y"}]), r"added_tokens\[0\]: an object with id"),
        (lambda d: d.update(added_tokens=[{"id": 1, "content": ""}]), r"added_tokens\[0\]: an object with id"),
        (lambda d: d.update(model={"type": "Nonsense"}), "the tokenizers library refuses the file"),
        (lambda d: d.pop("model"), "the tokenizers library refuses the file"),
        # A prefix longer than a token makes the library panic.
        (
            lambda d: d["model"].update(
                continuing_subword_prefix="x" * 100, vocab={"aa": 0, "b": 1}, merges=[["aa", "b"]]
            ),
            "the tokenizers library refuses the file",
        ),
    ],
)
def test_malformed_files_are_named(change: Any, message: str | None, folder: Path) -> None:
    path = folder / "tokenizer.json"
    definition = json.loads(path.read_text())
    change(definition)
    path.write_text(json.dumps(definition))
    if message is None:
        return
    with pytest.raises(CheckpointError, match=message) as caught:
        load_tokenizer(folder)
    assert str(path) in str(caught.value)


def test_an_unknown_special_name_is_named(folder: Path) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<nope>"}))
    with pytest.raises(CheckpointError, match=r"eos_token is '<nope>', which is no token of tokenizer.json"):
        load_tokenizer(folder)


@pytest.mark.parametrize("make", [byte_level_hf_tokenizer, sentencepiece_hf_tokenizer, wordpiece_hf_tokenizer])
def test_an_id_below_zero_is_no_token(make: Any) -> None:
    for decode in (make().token_bytes, lambda token_id: make().decode([1, token_id])):
        with pytest.raises(ValueError, match="token id -2 is negative"):
            decode(-2)


@pytest.mark.parametrize(
    ("token", "expected"),
    [("<0x0A>", b"\n"), ("<0xFF>", b"\xff"), ("<0xZZ>", b"<0xZZ>"), ("<0x0A", b"<0x0A"), ("\u2581a", b" a")],
)
def test_a_byte_that_a_token_falls_back_to(token: str, expected: bytes) -> None:
    assert _byte_fallback_bytes(token) == expected
