"""Corpus -> tokenizer and token ids in one folder, and batches of windows from them.

| file of the folder | holds |
|---|---|
| tokenizer/ | tiktoken.model and its companions (`kimi_backend.text.tiktoken_files`) |
| train.xz | training files in a random order, [EOS] after each: uint16 little-endian, LZMA |
| held_out.json | {"files": {key: token ids}, "prompts": [{"key", "token_ids"}]} |
| corpus.json | files, bytes and tokens by distribution, with its licence |
"""

import json
import lzma
import random
import shutil
import time
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kimi_backend.text.chat_template import CHAT_TEMPLATE_FILE
from kimi_backend.text.tokenizer import TIKTOKEN_FILE
from kimi_backend.text.tokenizer_files import TOKENIZER_CONFIG_FILE
from kimi_nano.corpus import SourceFile
from kimi_nano.prompts import Prompt, held_out_prompts

SHARDS = 8
"""Parts of train.xz, each a stream of its own, so that they unpack side by side."""


@dataclass(frozen=True, slots=True)
class Dataset:
    """The tokens that training and evaluation read."""

    train: np.ndarray[Any, np.dtype[np.uint16]]
    held_out: dict[str, list[int]]
    prompts: list[Prompt]


def prepare(
    folder: Path,
    files: Sequence[SourceFile],
    vocab_size: int,
    max_model_len: int,
    num_prompts: int,
    trained_tokenizer: Path | None = None,
) -> None:
    """Train the tokenizer on the training files, encode everything, write the folder.

    Args:
        trained_tokenizer: folder of a target whose tokenizer is taken instead, to train drafts for it.
    """
    from kimi_backend.text.tiktoken_files import write_tokenizer
    from kimi_backend.text.tokenizer import load_tokenizer
    from kimi_backend.text.train_bpe import train_bpe

    started = time.perf_counter()
    training = [file for file in files if not file.is_held_out]
    random.Random(0).shuffle(training)
    if trained_tokenizer is None:
        bpe = train_bpe((file.text for file in training), vocab_size)
        write_tokenizer(folder / "tokenizer", vocab_size, bpe.ranks, max_model_len)
        _print(started, f"tokenizer of {vocab_size} tokens from {len(training)} files")
    else:
        _copy_tokenizer(trained_tokenizer, folder / "tokenizer")
    tokenizer = load_tokenizer(folder / "tokenizer")
    end = tokenizer.eos_token_id
    assert end is not None, "Kimi's tokenizer files name [EOS]"
    encoded = [[*tokenizer.encode(file.text), end] for file in training]
    stream = np.concatenate([np.array(ids, "<u2") for ids in encoded])
    _print(started, f"{len(stream):,} training tokens")
    write_stream(folder / "train.xz", stream)
    held_out = [file for file in files if file.is_held_out]
    held_out_ids = {file.key: tokenizer.encode(file.text)[:max_model_len] for file in held_out}
    prompts = held_out_prompts(files, tokenizer.encode, num_prompts, max_model_len // 4)
    content = {"files": held_out_ids, "prompts": [asdict(prompt) for prompt in prompts]}
    (folder / "held_out.json").write_text(json.dumps(content))
    counts = dict(zip((file.key for file in training), map(len, encoded), strict=True))
    (folder / "corpus.json").write_text(json.dumps(_summary(files, counts), indent=1) + "\n")
    _print(started, f"{len(held_out)} files held out, {len(prompts)} prompts")


def _copy_tokenizer(source: Path, to: Path) -> None:
    to.mkdir(parents=True, exist_ok=True)
    for name in (TIKTOKEN_FILE, TOKENIZER_CONFIG_FILE, CHAT_TEMPLATE_FILE, "generation_config.json"):
        shutil.copy(source / name, to / name)


def write_stream(path: Path, stream: np.ndarray[Any, np.dtype[np.uint16]]) -> None:
    """Compress `SHARDS` parts; the file starts with their sizes."""
    parts = [part.tobytes() for part in np.array_split(stream, SHARDS)]
    with ThreadPoolExecutor() as pool:
        packed = list(pool.map(lambda part: lzma.compress(part, preset=2), parts))
    sizes = np.array([len(part) for part in packed], "<u8")
    path.write_bytes(sizes.tobytes() + b"".join(packed))


def read_stream(path: Path) -> np.ndarray[Any, np.dtype[np.uint16]]:
    raw = path.read_bytes()
    ends = np.cumsum(np.frombuffer(raw[: 8 * SHARDS], "<u8").astype(np.int64)) + 8 * SHARDS
    starts = [8 * SHARDS, *ends[:-1]]
    with ThreadPoolExecutor() as pool:
        parts = pool.map(lambda bounds: lzma.decompress(raw[bounds[0] : bounds[1]]), zip(starts, ends, strict=True))
        return np.concatenate([np.frombuffer(part, "<u2") for part in parts])


def load(folder: Path) -> Dataset:
    return Dataset(read_stream(folder / "train.xz"), *load_held_out(folder))


def load_held_out(folder: Path) -> tuple[dict[str, list[int]], list[Prompt]]:
    """Token ids of held-out files by key, and the prompts cut from them."""
    content = json.loads((folder / "held_out.json").read_text())
    return content["files"], [Prompt(**prompt) for prompt in content["prompts"]]


class Windows:
    """Random windows of one long stream, on the device."""

    def __init__(self, stream: np.ndarray[Any, np.dtype[np.uint16]], device: torch.device, seed: int) -> None:
        self._stream = torch.from_numpy(stream.astype(np.int16)).to(device)
        self._generator = torch.Generator().manual_seed(seed)

    def batch(self, num_windows: int, length: int) -> torch.Tensor:
        """[num_windows, length] int64."""
        last = len(self._stream) - length
        starts = torch.randint(0, last + 1, (num_windows,), generator=self._generator).to(self._stream.device)
        offsets = torch.arange(length, device=self._stream.device)
        return self._stream[starts[:, None] + offsets].long()

    def batch_ending(self, num_windows: int, length: int, may_end: torch.Tensor) -> torch.Tensor:
        """Make a `batch` of windows whose last token may end them.

        Args:
            may_end: [vocab_size] bool.
        """
        chosen: list[torch.Tensor] = []
        while sum(map(len, chosen)) < num_windows:
            candidates = self.batch(4 * num_windows, length)
            chosen.append(candidates[may_end[candidates[:, -1]]])
        return torch.cat(chosen)[:num_windows]


def pad(sequences: Sequence[Sequence[int]], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """[N, longest] int64, padded with 0 at the right, and the lengths [N] int64."""
    lengths = torch.tensor([len(sequence) for sequence in sequences])
    padded = torch.zeros(len(sequences), int(lengths.max()), dtype=torch.int64)
    for row, sequence in enumerate(sequences):
        padded[row, : len(sequence)] = torch.tensor(sequence)
    return padded.to(device), lengths.to(device)


def _summary(files: Sequence[SourceFile], num_tokens: dict[str, int]) -> dict[str, Any]:
    rows: dict[str, dict[str, Any]] = defaultdict(lambda: {"files": 0, "bytes": 0, "tokens": 0, "held_out_files": 0})
    for file in files:
        row = rows[file.distribution]
        row["licence"] = file.licence
        row["held_out_files"] += file.is_held_out
        if not file.is_held_out:
            row["files"] += 1
            row["bytes"] += len(file.text.encode())
            row["tokens"] += num_tokens[file.key]
    totals = {name: sum(row[name] for row in rows.values()) for name in ("files", "bytes", "tokens", "held_out_files")}
    return {"total": totals, "distributions": dict(sorted(rows.items(), key=lambda item: -item[1]["tokens"]))}


def _print(started: float, text: str) -> None:
    print(f"[{time.perf_counter() - started:6.1f} s] {text}", flush=True)
