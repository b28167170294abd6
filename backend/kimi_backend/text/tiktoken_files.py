"""Writes a tokenizer in Kimi's file format: tiktoken.model, tokenizer_config.json, chat_template.jinja,
generation_config.json. For checkpoints made from random or newly trained weights.
"""

import base64
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from kimi_backend.errors import ConfigError
from kimi_backend.text.chat_template import CHAT_TEMPLATE_FILE
from kimi_backend.text.tiktoken_tokenizer import NUM_BYTES, NUM_RESERVED_TOKENS
from kimi_backend.text.tokenizer import TIKTOKEN_FILE
from kimi_backend.text.tokenizer_files import TOKENIZER_CONFIG_FILE

MIN_VOCAB_SIZE = NUM_BYTES + NUM_RESERVED_TOKENS

SPECIAL_TOKEN_OFFSETS = {
    0: "[BOS]",
    1: "[EOS]",
    2: "<|im_end|>",
    3: "<|im_user|>",
    4: "<|im_assistant|>",
    6: "[start_header_id]",
    7: "[end_header_id]",
    9: "[EOT]",
    10: "<|im_system|>",
    11: "<|tool_calls_section_begin|>",
    12: "<|tool_calls_section_end|>",
    13: "<|tool_call_begin|>",
    14: "<|tool_call_argument_begin|>",
    15: "<|tool_call_end|>",
    17: "<|im_middle|>",
    18: "<|media_begin|>",
    19: "<|media_content|>",
    20: "<|media_end|>",
    21: "<|media_pad|>",
    22: "<think>",
    23: "</think>",
    254: "[UNK]",
    255: "[PAD]",
}
"""Place of each token in the block of 256 reserved ids at the end of the vocabulary, as in Kimi-K2.5."""
_VISIBLE_OFFSETS = frozenset({11, 12, 13, 14, 15, 22, 23})
"""Tokens that a client must see in the text: tool calls and think blocks."""

_MERGE_ALPHABET = "etaoinshrdlucmfwypvbgkjqxz"


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenTokenizer:
    """Ids that the model's config.json repeats."""

    vocab_size: int
    bos_token_id: int
    eos_token_id: int
    """The tokenizer's [EOS]; config.json names this one."""
    end_of_turn_id: int
    """<|im_end|>, which ends a reply; generation_config.json names this one."""
    pad_token_id: int
    media_placeholder_token_id: int


def write_tokenizer(
    out_dir: Path, vocab_size: int, ranks: Mapping[bytes, int] | None = None, max_model_len: int = 262_144
) -> WrittenTokenizer:
    """Write the four files into `out_dir`, made if it is not there.

    Args:
        vocab_size: with the 256 reserved ids at its end.
        ranks: token → rank for the ids below; None takes the 256 bytes and merges of English letters.
        max_model_len: written as the longest sequence.

    Raises:
        ConfigError: `vocab_size` below 512, or ranks that do not fill it exactly.
    """
    num_ranks = vocab_size - NUM_RESERVED_TOKENS
    if vocab_size < MIN_VOCAB_SIZE:
        raise ConfigError(f"vocab_size is {vocab_size}; at least {MIN_VOCAB_SIZE}: 256 bytes and 256 reserved ids")
    table = dict(ranks) if ranks is not None else synthetic_ranks(num_ranks)
    if sorted(table.values()) != list(range(num_ranks)):
        raise ConfigError(
            f"ranks has {len(table)} tokens; vocab_size {vocab_size} needs the ranks 0 to {num_ranks - 1}, each once"
        )
    out_dir.mkdir(parents=True, exist_ok=True)
    by_rank = sorted(table, key=table.__getitem__)
    lines = [f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(by_rank)]
    (out_dir / TIKTOKEN_FILE).write_text("".join(lines), encoding="ascii")
    _write_json(out_dir / TOKENIZER_CONFIG_FILE, _tokenizer_config(num_ranks, max_model_len))
    written = WrittenTokenizer(
        vocab_size=vocab_size,
        bos_token_id=num_ranks,
        eos_token_id=num_ranks + 1,
        end_of_turn_id=num_ranks + 2,
        pad_token_id=num_ranks + 255,
        media_placeholder_token_id=num_ranks + 21,
    )
    generation = {"eos_token_id": written.end_of_turn_id, "max_length": max_model_len}
    _write_json(out_dir / "generation_config.json", generation)
    (out_dir / CHAT_TEMPLATE_FILE).write_text(kimi_chat_template(), encoding="utf-8")
    return written


def kimi_chat_template() -> str:
    """The chat template that `write_tokenizer` writes."""
    template = resources.files("kimi_backend.text").joinpath("templates").joinpath("kimi_chat_template.jinja")
    return template.read_text(encoding="utf-8")


def synthetic_ranks(num_ranks: int) -> dict[bytes, int]:
    """A merge table without training: the 256 bytes, then letter pairs, triples and so on, commonest letters first.

    Every merged token is an earlier token and one letter more, so encoding can reach it.
    """
    ranks = {bytes([value]): value for value in range(NUM_BYTES)}
    for token in _letter_strings():
        if len(ranks) >= num_ranks:
            return ranks
        ranks[token.encode()] = len(ranks)
    raise AssertionError("the letter strings do not end")


def _letter_strings() -> Iterator[str]:
    shorter = list(_MERGE_ALPHABET)
    while True:
        longer = []
        for string in shorter:
            for letter in _MERGE_ALPHABET:
                yield string + letter
                longer.append(string + letter)
        shorter = longer


def _tokenizer_config(first_special_id: int, max_model_len: int) -> dict[str, object]:
    added = {
        str(first_special_id + offset): {
            "content": content,
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
            "special": offset not in _VISIBLE_OFFSETS,
        }
        for offset, content in SPECIAL_TOKEN_OFFSETS.items()
    }
    return {
        "added_tokens_decoder": added,
        "additional_special_tokens": [
            content
            for offset, content in SPECIAL_TOKEN_OFFSETS.items()
            if offset not in _VISIBLE_OFFSETS and content not in ("[BOS]", "[EOS]", "[UNK]", "[PAD]")
        ],
        "bos_token": "[BOS]",
        "clean_up_tokenization_spaces": False,
        "eos_token": "[EOS]",
        "model_max_length": max_model_len,
        "pad_token": "[PAD]",
        "tokenizer_class": "TikTokenTokenizer",
        "unk_token": "[UNK]",
    }


def _write_json(path: Path, value: Mapping[str, object]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
