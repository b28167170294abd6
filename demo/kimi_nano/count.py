"""The number of times that each token stands in the training text: what a draft with fewer tokens keeps."""

from pathlib import Path

import numpy as np

from kimi_backend.checkpoint.token_counts import TokenCounts
from kimi_backend.text.tokenizer import load_tokenizer
from kimi_nano.dataset import load


def count_tokens(data: Path, out: Path) -> TokenCounts:
    """Count the training tokens of a folder that `dataset.prepare` wrote, and write the counts to `out`."""
    vocab_size = load_tokenizer(data / "tokenizer").vocab_size
    counted = np.bincount(load(data).train, minlength=vocab_size)
    counts = TokenCounts.of(dict(enumerate(counted.tolist())), vocab_size)
    counts.write(out)
    return counts
