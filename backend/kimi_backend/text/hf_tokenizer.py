"""A Hugging Face `tokenizer.json`, run by the tokenizers library.

Text is cut at control tokens here, and the pieces are encoded by a copy of the tokenizer that has no control tokens.
So plain text cannot produce one by any road, a normaliser that rewrites look-alikes included. The price: an option of
an added token that reaches into the text around it (`lstrip`, `rstrip`, `single_word`) has no effect, and a
pre-tokenizer that treats the start of a text specially sees the start of each piece.

How ids become text depends on the file's decoder:

| decoder | `token_bytes` | `decode` |
|---|---|---|
| ByteLevel | the byte alphabet of GPT-2, read back | their concatenation |
| ▁ for a space, `<0xNN>` for a byte (SentencePiece) | the same | their concatenation; a leading space is kept |
| anything else (WordPiece …) | of the token alone | the library's, which looks at neighbours |
"""

import json
import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import tokenizers

from kimi_backend.errors import CheckpointError
from kimi_backend.text.special_tokens import AddedToken, ControlTokenSplitter
from kimi_backend.text.tokenizer import HF_TOKENIZER_FILE
from kimi_backend.text.tokenizer_files import (
    MAX_TOKEN_ID,
    TOKENIZER_CONFIG_FILE,
    TokenizerConfig,
    raise_problems,
    read_eos_token_ids,
    read_json_object,
)
from kimi_backend.text.unicode_text import require_valid_unicode

_SPACE_MARK = "\u2581"


class HfTokenizer:
    """Implements `kimi_backend.text.tokenizer.Tokenizer` over the tokenizers library."""

    def __init__(
        self,
        definition: Mapping[str, Any],
        special_names: Mapping[str, str],
        eos_token_ids: tuple[int, ...] | None = None,
    ) -> None:
        """Args:
        definition: the object in tokenizer.json.
        special_names: "bos_token" → its text and so on.
        eos_token_ids: what ends a reply; None takes the tokenizer's own end of sequence.

        Raises:
            ValueError: the library refuses the definition, or an added token is malformed; says why.
        """
        controls = {token.content: token for token in _read_added_tokens(definition) if _is_control(token)}
        plain_entries = [entry for entry in definition.get("added_tokens") or [] if entry["content"] not in controls]
        self._full = _build(definition)
        self._plain = _build({**definition, "added_tokens": plain_entries})
        vocab = self._full.get_vocab(with_added_tokens=True)
        # Without its neighbours an added token may get another number.
        plain_contents = [entry["content"] for entry in plain_entries]
        self._id_of_plain_id = {self._plain.token_to_id(content): vocab[content] for content in plain_contents}
        self._token_by_id: dict[int, str] = {token_id: token for token, token_id in vocab.items()}
        self.vocab_size = max(self._token_by_id, default=-1) + 1
        ids = {content: token.token_id for content, token in controls.items()}
        self.control_tokens: Mapping[str, int] = MappingProxyType(ids)
        self.special_token_ids = frozenset(token.token_id for token in controls.values() if token.is_special)
        self.special_names: Mapping[str, str] = MappingProxyType(dict(special_names))
        self._splitter = ControlTokenSplitter(ids)
        self._added_by_id = {token.token_id: token.content for token in _read_added_tokens(definition)}
        rule = _token_bytes_rule(definition.get("decoder"))
        self.longest_token_bytes: int | None = None  # normalizers may shorten a text by any factor
        self.is_byte_level = rule is not None
        self._bytes_of_token: Callable[[str], bytes] = rule or str.encode
        self.bos_token_id: int | None = vocab.get(special_names.get("bos_token", ""))
        self.eos_token_id: int | None = vocab.get(special_names.get("eos_token", ""))
        own_eos = () if self.eos_token_id is None else (self.eos_token_id,)
        self.eos_token_ids = own_eos if eos_token_ids is None else eos_token_ids

    @classmethod
    def from_folder(cls, folder: Path) -> "HfTokenizer":
        """Reads `tokenizer.json`, `tokenizer_config.json` if it is there, and the end-of-reply ids.

        Raises:
            CheckpointError: names the file, the key, and what is wrong.
        """
        path = folder / HF_TOKENIZER_FILE
        definition = read_json_object(path)
        config_path = folder / TOKENIZER_CONFIG_FILE
        names = TokenizerConfig.from_folder(folder).special_names if config_path.exists() else {}
        try:
            tokenizer = cls(definition, names)
        except ValueError as error:
            raise CheckpointError(str(path), [str(error)]) from error
        vocab = tokenizer._full.get_vocab(with_added_tokens=True)
        problems = [
            f"{key} is {name!r}, which is no token of {path.name}" for key, name in names.items() if name not in vocab
        ]
        raise_problems(config_path, problems)
        tokenizer.eos_token_ids = read_eos_token_ids(folder, tokenizer.eos_token_id, tokenizer.vocab_size)
        return tokenizer

    def encode(self, text: str, allow_special: bool = False, enough: float = math.inf) -> list[int]:
        """See `Tokenizer.encode`: all of it, as the library encodes a text in one go."""
        require_valid_unicode(text, "text")
        token_ids: list[int] = []
        for piece in self._splitter.split(text) if allow_special else [text]:
            if isinstance(piece, int):
                token_ids.append(piece)
            else:
                plain_ids = self._plain.encode(piece, add_special_tokens=False).ids
                token_ids.extend(self._id_of_plain_id.get(token_id, token_id) for token_id in plain_ids)
        return token_ids

    def decode(self, token_ids: Iterable[int], skip_special: bool = False) -> str:
        skipped = self.special_token_ids if skip_special else frozenset()
        kept = [token_id for token_id in token_ids if token_id not in skipped]
        if self.is_byte_level:
            return b"".join(map(self.token_bytes, kept)).decode("utf-8", errors="replace")
        if min(kept, default=0) < 0:
            raise ValueError(f"token id {min(kept)} is negative")
        return str(self._full.decode([token_id for token_id in kept if token_id in self._token_by_id], False))

    def token_bytes(self, token_id: int) -> bytes:
        if token_id < 0:
            raise ValueError(f"token id {token_id} is negative")
        added = self._added_by_id.get(token_id)
        if added is not None:
            return added.encode()
        token = self._token_by_id.get(token_id)
        return b"" if token is None else self._bytes_of_token(token)

    def is_special(self, token_id: int) -> bool:
        return token_id in self.special_token_ids


def _build(definition: Mapping[str, Any]) -> Any:
    try:
        return tokenizers.Tokenizer.from_str(json.dumps(definition))
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the library raises plain Exception; its panics derive from BaseException
        raise ValueError(f"the tokenizers library refuses the file: {error}") from error


def _read_added_tokens(definition: Mapping[str, Any]) -> list[AddedToken]:
    entries = definition.get("added_tokens") or []
    if not isinstance(entries, list):
        raise ValueError(f"added_tokens is a {type(entries).__name__}; a list is expected")
    tokens = []
    for index, entry in enumerate(entries):
        token_id, content = (entry.get("id"), entry.get("content")) if isinstance(entry, dict) else (None, None)
        is_text = isinstance(content, str) and bool(content)
        is_whole = isinstance(token_id, int) and not isinstance(token_id, bool)
        if not isinstance(token_id, int) or not is_whole or not 0 <= token_id <= MAX_TOKEN_ID or not is_text:
            allowed = f"an object with id (0 to {MAX_TOKEN_ID}) and content (text)"
            raise ValueError(f"added_tokens[{index}]: {allowed} is expected")
        tokens.append(AddedToken(token_id, str(content), bool(entry.get("special"))))
    return tokens


def _is_control(token: AddedToken) -> bool:
    """Runs of spaces and newlines that some files declare as added tokens are ordinary text."""
    return token.is_special or bool(token.content.strip())


def _token_bytes_rule(decoder: Any) -> Callable[[str], bytes] | None:
    """The bytes of a token's text, when that does not depend on its neighbours; None when it does."""
    if not isinstance(decoder, dict):
        return None
    parts = decoder.get("decoders", []) if decoder.get("type") == "Sequence" else [decoder]
    kinds = [part.get("type") for part in parts if isinstance(part, dict)]
    if kinds == ["ByteLevel"]:
        return byte_level_bytes
    joins_space_mark = any(
        (part.get("type") == "Metaspace" and part.get("replacement", _SPACE_MARK) == _SPACE_MARK)
        or (part.get("type"), part.get("pattern"), part.get("content")) == ("Replace", {"String": _SPACE_MARK}, " ")
        for part in parts
        if isinstance(part, dict)
    )
    allowed = {"Metaspace", "Replace", "ByteFallback", "Fuse", "Strip"}
    if joins_space_mark and set(kinds) <= allowed and kinds.count("Replace") <= 1:
        return _byte_fallback_bytes if "ByteFallback" in kinds else _space_mark_bytes
    return None


def _byte_alphabet() -> dict[str, int]:
    """The stand-ins of GPT-2's byte-level BPE: visible Latin-1 bytes are themselves, the rest follow U+0100."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [value for value in range(256) if value not in set(visible)]
    return {chr(value): value for value in visible} | {chr(0x100 + place): value for place, value in enumerate(hidden)}


_BYTE_OF_CHAR = _byte_alphabet()


def byte_level_bytes(token: str) -> bytes:
    """The bytes that a token of a byte-level vocabulary stands for, read from its printable form."""
    values = [_BYTE_OF_CHAR.get(char) for char in token]
    known = [value for value in values if value is not None]
    return bytes(known) if len(known) == len(values) else token.encode()


def _space_mark_bytes(token: str) -> bytes:
    return token.replace(_SPACE_MARK, " ").encode()


def _byte_fallback_bytes(token: str) -> bytes:
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return bytes([int(token[3:5], 16)])
        except ValueError:
            pass
    return _space_mark_bytes(token)
