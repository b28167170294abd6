"""Trained merges and the tiktoken file mean the same encoding."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kimi_backend.errors import ConfigError
from kimi_backend.text import chat_messages, tool_declaration
from kimi_backend.text.tiktoken_files import write_tokenizer
from kimi_backend.text.tokenizer import load_tokenizer
from kimi_backend.text.train_bpe import TrainedBpe, train_bpe
from support.tiny_tokenizers import REGRESSION_CORPUS, texts

CORPUS = [Path(str(module.__file__)).read_text() for module in (chat_messages, tool_declaration)]
TRAINED = train_bpe([*CORPUS, *REGRESSION_CORPUS], 1024)


def test_trained_texts_encode_the_same() -> None:
    lines = [line for text in CORPUS for line in text.splitlines()]
    assert TRAINED.count_differences([*CORPUS, *REGRESSION_CORPUS, *lines]) == (
        0,
        2 + len(REGRESSION_CORPUS) + len(lines),
    )


@given(batch=st.lists(texts(), min_size=5, max_size=5))
@settings(max_examples=60)
def test_other_texts_encode_the_same(batch: list[str]) -> None:
    # Unicode versions of the two pattern engines may differ on the newest characters; the corpus has none.
    known = ["".join(char for char in text if char < "\u0250" or "一" <= char <= "龥") for text in batch]
    assert TRAINED.count_differences(known) == (0, 5)


def test_differences_are_counted() -> None:
    # Merges in the opposite order are no longer what was trained.
    last = max(TRAINED.ranks.values())
    backwards = {token: rank if rank < 256 else 256 + last - rank for token, rank in TRAINED.ranks.items()}
    assert TrainedBpe(backwards, TRAINED.trained).count_differences(CORPUS) == (len(CORPUS), len(CORPUS))


def test_the_file_serves_what_was_trained(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, 1024, TRAINED.ranks)
    tokenizer = load_tokenizer(tmp_path)
    text = CORPUS[0]
    token_ids = tokenizer.encode(text)
    assert tokenizer.decode(token_ids) == text
    assert len(token_ids) < 0.5 * len(text.encode())


def test_bad_sizes_are_named() -> None:
    with pytest.raises(ConfigError, match="vocab_size is 500; at least 512"):
        train_bpe(["text"], 500)
    with pytest.raises(ConfigError, match=r"give only \d+ merges; allowed: up to \d+"):
        train_bpe(["ababab"], 4096)
