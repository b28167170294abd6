"""The written tokenizer has the real model's shape at any size."""

import json
from pathlib import Path

import pytest

from kimi_backend.errors import ConfigError
from kimi_backend.text.tiktoken_files import synthetic_ranks, write_tokenizer
from kimi_backend.text.tokenizer import load_tokenizer

KIMI_K25_IDS = {
    "[BOS]": 163584,
    "[EOS]": 163585,
    "<|im_end|>": 163586,
    "<|im_user|>": 163587,
    "<|im_assistant|>": 163588,
    "[EOT]": 163593,
    "<|im_system|>": 163594,
    "<|tool_calls_section_begin|>": 163595,
    "<|tool_calls_section_end|>": 163596,
    "<|tool_call_begin|>": 163597,
    "<|tool_call_argument_begin|>": 163598,
    "<|tool_call_end|>": 163599,
    "<|im_middle|>": 163601,
    "<|media_begin|>": 163602,
    "<|media_content|>": 163603,
    "<|media_end|>": 163604,
    "<|media_pad|>": 163605,
    "<think>": 163606,
    "</think>": 163607,
    "[UNK]": 163838,
    "[PAD]": 163839,
}


def test_full_size_has_the_real_ids(tmp_path: Path) -> None:
    written = write_tokenizer(tmp_path, 163_840)
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.vocab_size == written.vocab_size == 163_840
    assert {name: tokenizer.control_tokens[name] for name in KIMI_K25_IDS} == KIMI_K25_IDS
    assert (written.bos_token_id, written.eos_token_id, written.end_of_turn_id) == (163584, 163585, 163586)
    assert (written.pad_token_id, written.media_placeholder_token_id) == (163839, 163605)
    assert tokenizer.eos_token_ids == (163586,)
    assert tokenizer.decode(tokenizer.encode("the internet, 中文")) == "the internet, 中文"
    assert len(tokenizer.encode("the")) == 1


@pytest.mark.parametrize("vocab_size", [512, 513, 1024, 4096])
def test_any_size(vocab_size: int, tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "new" / "folder", vocab_size, max_model_len=2048)
    tokenizer = load_tokenizer(tmp_path / "new" / "folder")
    assert tokenizer.vocab_size == vocab_size
    assert tokenizer.control_tokens["[PAD]"] == vocab_size - 1
    generation = json.loads((tmp_path / "new" / "folder" / "generation_config.json").read_text())
    assert generation == {"eos_token_id": vocab_size - 254, "max_length": 2048}


def test_every_synthetic_token_can_be_reached(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, 2000)
    tokenizer = load_tokenizer(tmp_path)
    ranks = synthetic_ranks(2000 - 256)
    assert list(ranks.values()) == list(range(2000 - 256))
    reached = [tokenizer.encode(token.decode()) == [rank] for token, rank in ranks.items() if rank >= 256]
    assert sum(reached) > 0.5 * len(reached)
    assert all(token[:-1] in ranks for token, rank in ranks.items() if rank >= 256)


def test_thinking_and_tool_calls_stay_visible(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, 512)
    tokenizer = load_tokenizer(tmp_path)
    text = "<think></think><|tool_call_begin|><|im_end|>[EOS]"
    token_ids = tokenizer.encode(text, allow_special=True)
    assert tokenizer.decode(token_ids, skip_special=True) == "<think></think><|tool_call_begin|>"


def test_bad_sizes_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="vocab_size is 511; at least 512"):
        write_tokenizer(tmp_path, 511)
    with pytest.raises(ConfigError, match="ranks has 300 tokens; vocab_size 512 needs the ranks 0 to 255"):
        write_tokenizer(tmp_path, 512, synthetic_ranks(300))
