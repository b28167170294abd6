"""The identity of a full block of a sequence: a hash of everything up to its end."""

from hashlib import blake2b

import numpy as np

from kimi_backend.types.plan import Int32Array

DIGEST_BYTES = 16
BlockKey = bytes
DraftBlockKey = tuple[BlockKey, int]
"""Draft row p depends on token p + 1, so a draft block is its target block's key and the token after the block."""


class HashChain:
    """Keys of a sequence's full blocks; key i covers the salt and tokens 0 up to the end of block i."""

    def __init__(self, block_size: int, cache_salt: str | None = None) -> None:
        self.block_size = block_size
        self.keys: list[BlockKey] = []
        salt = b"" if cache_salt is None else b"salt:" + cache_salt.encode()
        self._root = blake2b(salt, digest_size=DIGEST_BYTES).digest()

    def extend(self, token_ids: Int32Array, num_blocks: int) -> None:
        """Add the keys up to block `num_blocks` (exclusive).

        Args:
            token_ids: [at least num_blocks * block_size], the sequence from its first token.
        """
        size = self.block_size
        parent = self.keys[-1] if self.keys else self._root
        for block in range(len(self.keys), num_blocks):
            tokens = np.ascontiguousarray(token_ids[block * size : (block + 1) * size])
            parent = blake2b(parent + tokens.tobytes(), digest_size=DIGEST_BYTES).digest()
            self.keys.append(parent)
