"""Prompts for a trace that has lengths and no text: made of what the served model itself writes.

Random tokens would make every draft fail. So the model is asked for some text first, and each hash id gets a block of
pieces of it, always the same ones.
"""

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass

from kimi_backend.cli.trace_file import Turn
from kimi_backend.errors import KimiError
from kimi_client import KimiClient

PIECE = 32
NUM_SAMPLES, SAMPLE_TOKENS = 32, 256
_OPENINGS = ("def ", "import ", "class ", "The ", "In ", "for ", "# ", "return ")


@dataclass(frozen=True, slots=True)
class PromptPool:
    """Token ids of running text, and the blocks that are cut from it."""

    token_ids: tuple[int, ...]
    block_size: int
    """Tokens that a hash id stands for."""

    def prompt(self, turn: Turn, name: str) -> list[int]:
        """A turn's own tokens, exactly as many as it says.

        Args:
            name: of the turn; two turns without hash ids get different tokens.
        """
        token_ids: list[int] = []
        for hash_id in turn.hash_ids:
            token_ids += self._text(f"hash {hash_id}", self.block_size)
        token_ids += self._text(name, max(0, turn.input_length - len(token_ids)))
        return token_ids[: turn.input_length]

    def _text(self, name: str, length: int) -> list[int]:
        source = random.Random(hashlib.sha256(name.encode()).digest())
        token_ids: list[int] = []
        while len(token_ids) < length:
            at = source.randrange(max(1, len(self.token_ids) - PIECE))
            token_ids += self.token_ids[at : at + PIECE]
        return token_ids[:length]


def sample_pool(client: KimiClient, block_size: int, openings: Sequence[str] = _OPENINGS) -> PromptPool:
    """Have the served model write the text, at temperature 1, the same for the same model.

    Raises:
        KimiClientError: the server does not answer.
        KimiError: it wrote next to nothing.
    """
    streams = [
        client.stream(
            text_input=openings[i % len(openings)],
            max_tokens=SAMPLE_TOKENS,
            temperature=1.0,
            seed=i,
            ignore_eos=True,
            return_token_ids=True,
        )
        for i in range(NUM_SAMPLES)
    ]
    token_ids = tuple(token_id for stream in streams for token_id in stream.result().token_ids)
    if len(token_ids) < 4 * PIECE:
        raise KimiError(f"the served model wrote {len(token_ids)} tokens to make prompts of, which are too few")
    return PromptPool(token_ids, block_size)
