"""The engine's view of a tokenizer, and the choice of one from a checkpoint's files."""

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Protocol

from kimi_backend.errors import CheckpointError

TIKTOKEN_FILE = "tiktoken.model"
HF_TOKENIZER_FILE = "tokenizer.json"


class Tokenizer(Protocol):
    """Text to token ids and back. Immutable, so threads may share one."""

    @property
    def vocab_size(self) -> int:
        """One more than the largest id that has a token."""
        ...

    @property
    def control_tokens(self) -> Mapping[str, int]:
        """Text → id of every token that must never come from a client's text, reserved ones included."""
        ...

    @property
    def special_token_ids(self) -> frozenset[int]:
        """Ids that `decode` leaves out when told to skip special tokens: a subset of the control tokens."""
        ...

    @property
    def special_names(self) -> Mapping[str, str]:
        """The files' names of the tokens with a role: "bos_token" → "[BOS]", and so on."""
        ...

    @property
    def bos_token_id(self) -> int | None: ...

    @property
    def eos_token_id(self) -> int | None:
        """The tokenizer's own end of sequence; see `eos_token_ids` for what ends a reply."""
        ...

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Every id that ends a reply: generation_config.json's and config.json's, else the tokenizer's own."""
        ...

    @property
    def longest_token_bytes(self) -> int | None:
        """Bytes of text that one token stands for at most; None where a text may be changed before it is encoded."""
        ...

    @property
    def is_byte_level(self) -> bool:
        """`decode` is the concatenation of `token_bytes`, read as UTF-8 with U+FFFD for what is not."""
        ...

    def encode(self, text: str, allow_special: bool = False, enough: float = math.inf) -> list[int]:
        """Token ids of `text`, with nothing added at either end.

        Args:
            allow_special: read control tokens written in the text as such. Off, they are encoded as plain text, so
                that a client cannot forge a turn (prompt injection).
            enough: the rest of a long text may be left out once there are more ids than this.

        Raises:
            InvalidRequestError: the text holds a lone surrogate.
        """
        ...

    def decode(self, token_ids: Iterable[int], skip_special: bool = False) -> str:
        """Text of the ids; an id without a token (padding rows of an embedding) adds nothing.

        Raises:
            ValueError: a negative id.
        """
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that one token adds, possibly a part of a character; empty for an id without a token."""
        ...

    def is_special(self, token_id: int) -> bool:
        """Tell whether the id is in `special_token_ids`."""
        ...


def load_tokenizer(path: str | Path) -> Tokenizer:
    """The tokenizer of the checkpoint in folder `path`, from `tiktoken.model` or else `tokenizer.json`.

    Only data files are read: the Python classes that `auto_map` names are never run.

    Raises:
        CheckpointError: no such folder or file, or a file that is malformed; names file, line and what is allowed.
    """
    from kimi_backend.text.hf_tokenizer import HfTokenizer
    from kimi_backend.text.tiktoken_tokenizer import TiktokenTokenizer

    folder = Path(path)
    if not folder.is_dir():
        reason = "is a file" if folder.exists() else "does not exist"
        raise CheckpointError(str(folder), [f"{reason}; a checkpoint is a folder"])
    if (folder / TIKTOKEN_FILE).exists():
        return TiktokenTokenizer.from_folder(folder)
    if (folder / HF_TOKENIZER_FILE).exists():
        return HfTokenizer.from_folder(folder)
    raise CheckpointError(str(folder), [f"has no tokenizer: expected {TIKTOKEN_FILE} or {HF_TOKENIZER_FILE}"])
