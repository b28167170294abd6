"""Trains a byte-level BPE vocabulary on texts and gives it as tiktoken ranks.

The two file formats do not mean quite the same. A Hugging Face merge is a pair: "ab" + "c" → "abc". A tiktoken rank
is a result: any two neighbours that make up "abc" merge, at that rank. So where training built "abc" in one way only,
tiktoken may merge what the trained merges leave apart. `count_differences` measures it (none so far, on trained texts
or random ones); serving follows tiktoken, which is what the file format says.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import tokenizers
from tokenizers import models, pre_tokenizers, trainers

from kimi_backend.errors import ConfigError
from kimi_backend.text.hf_tokenizer import byte_level_bytes
from kimi_backend.text.tiktoken_files import MIN_VOCAB_SIZE
from kimi_backend.text.tiktoken_tokenizer import (
    NUM_BYTES,
    NUM_RESERVED_TOKENS,
    PRE_TOKENIZER_ALTERNATIVES,
    TiktokenTokenizer,
)


@dataclass(frozen=True, slots=True)
class TrainedBpe:
    """A trained vocabulary in both meanings."""

    ranks: dict[bytes, int]
    """Token → rank: the 256 bytes, then the merges in the order they were learnt."""
    trained: Any
    """The tokenizers library's own tokenizer, with its merges."""

    def count_differences(self, texts: Iterable[str]) -> tuple[int, int]:
        """(texts that tiktoken encodes unlike the trained merges, texts compared)."""
        served = TiktokenTokenizer(self.ranks, (), {})
        num_different = num_texts = 0
        for text in texts:
            tokens = self.trained.encode(text, add_special_tokens=False).tokens
            expected = [self.ranks[byte_level_bytes(token)] for token in tokens]
            num_different += served.encode(text) != expected
            num_texts += 1
        return num_different, num_texts


def train_bpe(texts: Iterable[str], vocab_size: int) -> TrainedBpe:
    """Learn merges on `texts`, cut into pieces by Kimi's pattern.

    Args:
        vocab_size: of the finished tokenizer, its 256 reserved ids included: `tiktoken_files.write_tokenizer` takes the
            ranks and the same number.

    Raises:
        ConfigError: `vocab_size` below 512, or more than the texts have merges for.
    """
    if vocab_size < MIN_VOCAB_SIZE:
        raise ConfigError(f"vocab_size is {vocab_size}; at least {MIN_VOCAB_SIZE}: 256 bytes and 256 reserved ids")
    num_ranks = vocab_size - NUM_RESERVED_TOKENS
    trained = tokenizers.Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex("|".join(PRE_TOKENIZER_ALTERNATIVES)), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=num_ranks, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    trained.train_from_iterator(texts, trainer)
    ranks = _ranks_in_merge_order(trained.get_vocab())
    if len(ranks) != num_ranks:
        raise ConfigError(
            f"vocab_size is {vocab_size}, but the texts give only {len(ranks) - NUM_BYTES} merges;"
            f" allowed: up to {len(ranks) + NUM_RESERVED_TOKENS}, or give more text"
        )
    return TrainedBpe(ranks, trained)


def _ranks_in_merge_order(vocab: dict[str, int]) -> dict[bytes, int]:
    """Single bytes get their own value as rank; the trainer numbers its merges in order after its alphabet."""
    merged = [byte_level_bytes(token) for token in sorted(vocab, key=vocab.__getitem__) if len(token) > 1]
    ranks = {bytes([value]): value for value in range(NUM_BYTES)}
    return ranks | {token: NUM_BYTES + place for place, token in enumerate(merged)}
