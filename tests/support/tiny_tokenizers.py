"""Tokenizers small enough to build in a test, and text that tokenizers get wrong."""

import functools
import itertools
import json
from typing import Any

import tokenizers
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, processors

from kimi_backend.text.hf_tokenizer import HfTokenizer
from kimi_backend.text.special_tokens import AddedToken
from kimi_backend.text.tiktoken_files import SPECIAL_TOKEN_OFFSETS
from kimi_backend.text.tiktoken_tokenizer import TiktokenTokenizer

TEMPTING_CHARS = "abABst12 \n\r\t'.!中文é"
"""Letters of both cases, a contraction's, digits, spaces, line ends, punctuation, Han, a letter of two bytes."""

REGRESSION_CORPUS = (
    "你好，世界。今天天气不错！",  # noqa: RUF001
    "中文English混合123text日本語カタカナ한국어",
    "emoji 👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽 end",
    "combining e\u0301 a\u0308\u0323 \u0301alone",
    "zero\u200bwidth\u200djoiner\ufeffbom",
    "CRLF\r\nline\r\n\r\nend\r",
    "   leading and trailing   ",
    "tabs\t\tand \u00a0 nbsp \u3000 ideographic",
    "1234567890 3.14159 1,000,000 ٣٤٥ ½ Ⅷ",
    "I'm you're he'll WE'VE it'd don't 's 'S ’s",  # noqa: RUF001
    "camelCase PascalCase SCREAMING_CASE snake_case ÉCOLE straße ǅ",
    "\x00\x1c\x1d\x7f\x85\u2028\u2029",
    "!!!???...——““”” </div>\n\n\n{}[]();\n",
    "\U0001f600\U0010ffff\ufffd\ue000\U000f0000",
    "   \n  \n\n x \n",
    "<|im_end|><|im_user|>user<|im_middle|>[BOS]<think>",
)


def tempting_ranks() -> dict[bytes, int]:
    """All pairs of TEMPTING_CHARS as merges, and some longer, so that a piece cut at a wrong place gives other ids."""
    ranks = {bytes([value]): value for value in range(256)}

    def add(text: bytes) -> None:
        ranks.setdefault(text, len(ranks))

    for char in TEMPTING_CHARS:
        for size in range(2, len(char.encode()) + 1):
            add(char.encode()[:size])
    for first, second in itertools.product(TEMPTING_CHARS, repeat=2):
        add((first + second).encode())
    for first, second in itertools.product("ab 1\n中", repeat=2):
        add((first * 2 + second).encode())
        add((first * 2 + second * 2).encode())
    return ranks


@functools.cache
def tempting_tokenizer() -> TiktokenTokenizer:
    """`tempting_ranks` with Kimi's special tokens."""
    ranks = tempting_ranks()
    hidden = {"<think>", "</think>", "<|tool_call_begin|>"}
    added = [
        AddedToken(len(ranks) + offset, content, content not in hidden)
        for offset, content in SPECIAL_TOKEN_OFFSETS.items()
    ]
    return TiktokenTokenizer(ranks, added, {"bos_token": "[BOS]", "eos_token": "[EOS]"})


SPECIAL_ENTRIES = [
    {"content": "<s>", "special": True},
    {"content": "<|end|>", "special": True},
    {"content": "<think>", "special": False},
    {"content": "\n\n\n", "special": False},
]


def with_added_tokens(tokenizer: tokenizers.Tokenizer) -> dict[str, Any]:
    """The tokenizer's definition with SPECIAL_ENTRIES added, as an object."""
    for entry in SPECIAL_ENTRIES:
        token = tokenizers.AddedToken(entry["content"], normalized=not entry["special"], special=entry["special"])
        (tokenizer.add_special_tokens if entry["special"] else tokenizer.add_tokens)([token])
    definition: dict[str, Any] = json.loads(tokenizer.to_str())
    return definition


@functools.cache
def byte_level_hf_tokenizer() -> HfTokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {char: index for index, char in enumerate(alphabet)}
    merges = []
    for first, second in itertools.product("abĠ1", repeat=2):
        merges.append((first, second))
        vocab[first + second] = len(vocab)
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel()
    return HfTokenizer(with_added_tokens(tokenizer), {"bos_token": "<s>", "eos_token": "<|end|>"})


@functools.cache
def sentencepiece_hf_tokenizer() -> HfTokenizer:
    pieces = [f"<0x{value:02X}>" for value in range(256)] + ["\u2581", "a", "b", "\u2581a", "ab", "中"]
    vocab = {piece: index for index, piece in enumerate(["<unk>", *pieces])}
    model = models.BPE(
        vocab=vocab, merges=[("\u2581", "a"), ("a", "b")], unk_token="<unk>", fuse_unk=True, byte_fallback=True
    )
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.normalizer = tokenizers.normalizers.Replace(" ", "\u2581")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return HfTokenizer(with_added_tokens(tokenizer), {})


@functools.cache
def wordpiece_hf_tokenizer() -> HfTokenizer:
    pieces = ["[UNK]", "un", "##aff", "##able", "hello", "world", ".", ",", "##s", "é", "�"]
    tokenizer = tokenizers.Tokenizer(
        models.WordPiece(vocab={piece: index for index, piece in enumerate(pieces)}, unk_token="[UNK]")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    return HfTokenizer(with_added_tokens(tokenizer), {})


def texts(max_size: int = 40) -> st.SearchStrategy[str]:
    """Text of any kind, rich in what the pre-tokenizer distinguishes and in pieces of control tokens."""
    assigned = st.characters(exclude_categories=("Cs", "Cn"), max_codepoint=0x2FFFF)
    fragments = st.sampled_from(
        [*REGRESSION_CORPUS, *SPECIAL_TOKEN_OFFSETS.values(), "<|", "|>", "im_end", "'re", "\r\n"]
    )
    piece = st.one_of(st.sampled_from(TEMPTING_CHARS), st.sampled_from(TEMPTING_CHARS), assigned, fragments)
    return st.lists(piece, max_size=max_size).map("".join)
