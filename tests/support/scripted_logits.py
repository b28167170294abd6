"""Next-token logits as a pure function of the tokens before: a hash chain over the prefix, numbers from its hash."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Hashes = npt.NDArray[np.uint64]

ROOT = np.uint64(0x9E3779B97F4A7C15)
SCALES = np.array([0.3, 2.0, 8.0, 20.0], np.float32)
"""Scales from nearly flat to nearly certain; a prefix's hash picks one."""


def mix(parent: Hashes, token_ids: npt.NDArray[np.integer]) -> Hashes:
    """Hash of a prefix and one token more; splitmix64's finaliser (Steele et al. 2014)."""
    value = parent ^ ((token_ids.astype(np.uint64) + np.uint64(1)) * np.uint64(0xBF58476D1CE4E5B9))
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


def prefix_hash(token_ids: list[int]) -> int:
    """Hash of a whole prefix."""
    value = np.array([ROOT])
    for token_id in token_ids:
        value = mix(value, np.array([token_id]))
    return int(value[0])


@dataclass(frozen=True, slots=True)
class LogitScript:
    """Integers and exactly rounded float32 products only, so a row's bits never depend on its neighbours."""

    vocab_size: int
    salt: int = 0
    scales: tuple[float, ...] = tuple(SCALES.tolist())
    nan_token_id: int | None = None
    """A prefix that ends in this token has NaN logits."""

    def logits(self, prefixes: Hashes) -> npt.NDArray[np.float32]:
        """[R] -> [R, vocab_size]."""
        start = mix(prefixes, np.full(len(prefixes), self.salt))
        values = mix(start[:, None] ^ np.uint64(0x5851F42D4C957F2D), np.arange(self.vocab_size)[None, :])
        unit = (values >> np.uint64(40)).astype(np.float32) * np.float32(2**-24)
        scales = np.array(self.scales, np.float32)
        return unit * scales[(start >> np.uint64(11)) % np.uint64(len(scales))][:, None]
