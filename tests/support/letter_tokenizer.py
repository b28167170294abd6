"""A tokenizer whose every token is one character, for tests that look at text."""

from collections.abc import Iterable, Mapping


class LetterTokenizer:
    """`text.tokenizer.Tokenizer`: token i is the character chr(ord("A") + i)."""

    bos_token_id = None
    eos_token_id = None
    eos_token_ids: tuple[int, ...] = ()
    is_byte_level = True
    longest_token_bytes = None
    control_tokens: Mapping[str, int] = {}
    special_names: Mapping[str, str] = {}
    special_token_ids: frozenset[int] = frozenset()

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def encode(self, text: str, allow_special: bool = False) -> list[int]:
        return [ord(char) - ord("A") for char in text]

    def decode(self, token_ids: Iterable[int], skip_special: bool = False) -> str:
        return "".join(chr(ord("A") + token_id) for token_id in token_ids)

    def token_bytes(self, token_id: int) -> bytes:
        return chr(ord("A") + token_id).encode()

    def is_special(self, token_id: int) -> bool:
        return False
