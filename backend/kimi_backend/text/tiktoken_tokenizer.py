"""Kimi's tokenizer: byte-level BPE ranks in `tiktoken.model`, special tokens in `tokenizer_config.json`.

| ids | tokens |
|---|---|
| 0 … num_ranks − 1 | the ranks of `tiktoken.model`, one "base64(token) rank" a line; merges go by rank |
| num_ranks … num_ranks + 255 | `added_tokens_decoder`; an id without an entry is `<|reserved_token_ID|>` |
| above | further entries of `added_tokens_decoder` |
"""

import base64
import binascii
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType

import tiktoken

from kimi_backend.config.regular_files import read_regular_file
from kimi_backend.errors import CheckpointError
from kimi_backend.text.special_tokens import AddedToken, ControlTokenSplitter
from kimi_backend.text.tokenizer import TIKTOKEN_FILE
from kimi_backend.text.tokenizer_files import (
    TOKENIZER_CONFIG_FILE,
    TokenizerConfig,
    raise_problems,
    read_eos_token_ids,
)
from kimi_backend.text.unicode_text import require_valid_unicode

NUM_RESERVED_TOKENS = 256
NUM_BYTES = 256

_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
PRE_TOKENIZER_ALTERNATIVES = (
    r"[\p{Han}]+",
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTION}",
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTION}",
    r"\p{N}{1,3}",
    r" ?[^\s\p{L}\p{N}]+[\r\n]*",
    r"\s*[\r\n]+",
    r"\s+(?!\S)",
    r"\s+",
)
"""Patterns of the pieces that text is cut into before merging, in this order. A fact of the checkpoints: the file
format does not carry it."""

MAX_SLICE_CHARS = 400_000
"""The pattern engine gives up on longer inputs; the checkpoints' own code cuts here too, so the ids agree."""
MAX_RUN_CHARS = 25_000
"""Longest run of spaces, or of other characters, that is encoded in one go; longer ones are cut for the same reason."""


_SPACE = re.compile(r"\s")


class TiktokenTokenizer:
    """Implements `kimi_backend.text.tokenizer.Tokenizer` over the tiktoken library."""

    is_byte_level = True

    def __init__(
        self,
        ranks: Mapping[bytes, int],
        added_tokens: Iterable[AddedToken],
        special_names: Mapping[str, str],
        eos_token_ids: tuple[int, ...] | None = None,
    ) -> None:
        """Args:
        ranks: token → rank, ranks 0 … n − 1, every single byte among the tokens.
        added_tokens: ids from n on; gaps in the first 256 are filled with reserved tokens.
        special_names: "bos_token" → its text and so on; each names an added token.
        eos_token_ids: what ends a reply; None takes the tokenizer's own end of sequence.
        """
        declared = {token.token_id: token for token in added_tokens}
        for token_id in range(len(ranks), len(ranks) + NUM_RESERVED_TOKENS):
            declared.setdefault(token_id, AddedToken(token_id, f"<|reserved_token_{token_id}|>", True))
        self._encoding = tiktoken.Encoding(
            "kimi", pat_str="|".join(PRE_TOKENIZER_ALTERNATIVES), mergeable_ranks=dict(ranks), special_tokens={}
        )
        self.longest_token_bytes: int | None = max(map(len, ranks))
        self._bytes_by_id = {rank: token for token, rank in ranks.items()}
        self._bytes_by_id |= {token_id: token.content.encode() for token_id, token in declared.items()}
        self.vocab_size = max(self._bytes_by_id) + 1
        ids = {token.content: token_id for token_id, token in sorted(declared.items())}
        self.control_tokens: Mapping[str, int] = MappingProxyType(ids)
        self.special_token_ids = frozenset(token_id for token_id, token in declared.items() if token.is_special)
        self.special_names: Mapping[str, str] = MappingProxyType(dict(special_names))
        self._splitter = ControlTokenSplitter(ids)
        self.bos_token_id = self._named_id("bos_token")
        self.eos_token_id = self._named_id("eos_token")
        own_eos = () if self.eos_token_id is None else (self.eos_token_id,)
        self.eos_token_ids = own_eos if eos_token_ids is None else eos_token_ids

    @classmethod
    def from_folder(cls, folder: Path) -> "TiktokenTokenizer":
        """Reads `tiktoken.model`, `tokenizer_config.json` and the end-of-reply ids.

        Raises:
            CheckpointError: names the file, the line or key, and what is allowed.
        """
        ranks = read_ranks(folder / TIKTOKEN_FILE)
        config = TokenizerConfig.from_folder(folder)
        _check_added_tokens(folder / TOKENIZER_CONFIG_FILE, config, len(ranks))
        tokenizer = cls(ranks, config.added_tokens, config.special_names)
        tokenizer.eos_token_ids = read_eos_token_ids(folder, tokenizer.eos_token_id, tokenizer.vocab_size)
        return tokenizer

    def encode(self, text: str, allow_special: bool = False, enough: float = math.inf) -> list[int]:
        require_valid_unicode(text, "text")
        pieces = self._splitter.split(text) if allow_special else [text]
        token_ids: list[int] = []
        for piece in pieces:
            if isinstance(piece, int):
                token_ids.append(piece)
                continue
            for part in slice_for_encoding(piece):
                if len(token_ids) > enough:
                    return token_ids
                token_ids.extend(self._encoding.encode_ordinary(part))
        return token_ids

    def decode(self, token_ids: Iterable[int], skip_special: bool = False) -> str:
        skipped = self.special_token_ids if skip_special else frozenset()
        data = b"".join(self.token_bytes(token_id) for token_id in token_ids if token_id not in skipped)
        return data.decode("utf-8", errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        if token_id < 0:
            raise ValueError(f"token id {token_id} is negative")
        return self._bytes_by_id.get(token_id, b"")

    def is_special(self, token_id: int) -> bool:
        return token_id in self.special_token_ids

    def _named_id(self, key: str) -> int | None:
        name = self.special_names.get(key)
        return None if name is None else self.control_tokens[name]


def slice_for_encoding(
    text: str, max_slice_chars: int = MAX_SLICE_CHARS, max_run_chars: int = MAX_RUN_CHARS
) -> Iterator[str]:
    """Cuts `text` where the pattern engine needs it: every `max_slice_chars` characters, and within those, runs of one
    space-ness every `max_run_chars` characters. Joined, the parts are the text."""
    long_run = _long_run_pattern(max_run_chars)
    for start in range(0, len(text), max_slice_chars):
        part = text[start : start + max_slice_chars]
        end_of_last = 0
        for run in long_run.finditer(part) if _may_have_long_run(part, max_run_chars) else ():
            for cut in range(run.start() + max_run_chars, run.end(), max_run_chars):
                yield part[end_of_last:cut]
                end_of_last = cut
        yield part[end_of_last:]


def _may_have_long_run(part: str, max_run_chars: int) -> bool:
    """Tell whether some block is of one space-ness: of the blocks of half its length a longer run covers one. The
    pattern would look at each character up to the end of its word, 10 ms in which no other thread runs."""
    size = max(1, max_run_chars // 2)
    blocks = (part[start : start + size] for start in range(0, len(part) - size + 1, size))
    return any(block.isspace() or _SPACE.search(block) is None for block in blocks)


@lru_cache
def _long_run_pattern(max_run_chars: int) -> re.Pattern[str]:
    return re.compile(rf"\s{{{max_run_chars + 1},}}|\S{{{max_run_chars + 1},}}")


def read_ranks(path: Path) -> dict[bytes, int]:
    """The merge table of a `tiktoken.model` file: token → rank.

    Raises:
        CheckpointError: a line that is not "base64 rank", a rank or token twice, ranks that leave a gap, or a byte that
            has no token; names file and line.
    """
    try:
        lines = read_regular_file(path).splitlines()
    except OSError as error:
        raise CheckpointError(str(path), [f"cannot be read: {error.strerror or error}"]) from error
    ranks: dict[bytes, int] = {}
    line_of_rank: dict[int, int] = {}
    problems: list[str] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            token, rank = _parse_rank_line(line)
        except ValueError as error:
            problems.append(f"line {number}: {error}; a line is base64(token), a space, and the token's rank")
            continue
        if token in ranks:
            problems.append(f"line {number}: token {token!r} is on line {line_of_rank[ranks[token]]} already")
        elif rank in line_of_rank:
            problems.append(f"line {number}: rank {rank} is on line {line_of_rank[rank]} already; each rank goes once")
        else:
            ranks[token] = rank
            line_of_rank[rank] = number
    if not problems:
        problems = _table_problems(ranks, line_of_rank)
    raise_problems(path, problems)
    return ranks


def _parse_rank_line(line: bytes) -> tuple[bytes, int]:
    fields = line.split()
    if len(fields) != 2:
        raise ValueError(f"{_shown(line)} has {len(fields)} fields instead of 2")
    try:
        token = base64.b64decode(fields[0], validate=True)
    except binascii.Error as error:
        raise ValueError(f"{_shown(fields[0])} is not base64") from error
    if not token:
        raise ValueError("the token is empty")
    if not fields[1].isdigit():
        raise ValueError(f"rank {_shown(fields[1])} is not a whole number")
    return token, int(fields[1])


def _shown(data: bytes) -> str:
    text = data[:40].decode("utf-8", errors="backslashreplace")
    return repr(text + ("…" if len(data) > 40 else ""))


def _table_problems(ranks: dict[bytes, int], line_of_rank: dict[int, int]) -> list[str]:
    missing_bytes = [value for value in range(NUM_BYTES) if bytes([value]) not in ranks]
    if missing_bytes:
        shown = ", ".join(f"0x{value:02x}" for value in missing_bytes[:8]) + (" …" if len(missing_bytes) > 8 else "")
        return [f"{len(missing_bytes)} of 256 single bytes have no token ({shown}); every byte needs one"]
    gaps = [rank for rank in range(len(ranks)) if rank not in line_of_rank]
    if gaps:
        return [f"rank {gaps[0]} is missing; {len(ranks)} tokens need the ranks 0 to {len(ranks) - 1}"]
    return []


def _check_added_tokens(path: Path, config: TokenizerConfig, num_ranks: int) -> None:
    problems = []
    contents = set()
    ids = {token.token_id for token in config.added_tokens}
    for token in config.added_tokens:
        contents.add(token.content)
        if token.token_id < num_ranks:
            problems.append(
                f"added_tokens_decoder[{str(token.token_id)!r}] {token.content!r} takes the id of a token in"
                f" {TIKTOKEN_FILE}; allowed: {num_ranks} and up"
            )
    reserved = {f"<|reserved_token_{num_ranks + offset}|>": num_ranks + offset for offset in range(NUM_RESERVED_TOKENS)}
    for token in config.added_tokens:
        if reserved.get(token.content, token.token_id) != token.token_id:
            problems.append(
                f"added_tokens_decoder[{str(token.token_id)!r}] is named {token.content!r}, the name of another id"
            )
    contents |= {name for name, token_id in reserved.items() if token_id not in ids}
    for key, name in config.special_names.items():
        if name not in contents:
            problems.append(f"{key} is {name!r}, which is not in added_tokens_decoder")
    raise_problems(path, problems)
