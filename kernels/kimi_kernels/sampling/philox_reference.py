"""Philox 4x32-10 in int64 arithmetic, and the 32 noise bits of every token (docs/sampling.md, "Noise bits")."""

import torch
from torch import Tensor

from kimi_kernels.sampling.constants import PHILOX_KEY_STEPS, PHILOX_MULTIPLIERS, PHILOX_ROUNDS, SAMPLE_INDEX

_LOW_32 = 0xFFFFFFFF


def philox4x32(counter: Tensor, key: Tensor) -> Tensor:
    """Ten rounds of Philox 4x32 (Salmon et al. 2011).

    Args:
        counter: [4, ...] int64, each word in [0, 2^32).
        key: [2, ...] int64, each word in [0, 2^32); broadcasts against the counter's words.
    Returns:
        [4, ...] int64, each word in [0, 2^32).
    """
    lead = [1] * (counter.dim() - 1)
    multipliers = torch.tensor(PHILOX_MULTIPLIERS, device=counter.device).view(2, *lead)
    round_keys = _round_keys(key)
    # Words 0 and 2 are multiplied; a product wraps at 64 bits, which keeps both of its halves right.
    multiplied, mixed = counter[0::2], counter[1::2]
    for round_index in range(PHILOX_ROUNDS):
        products = (multiplied * multipliers).flip(0)
        multiplied = (products >> 32).bitwise_and_(_LOW_32).bitwise_xor_(mixed).bitwise_xor_(round_keys[round_index])
        mixed = products.bitwise_and_(_LOW_32)
    return torch.stack((multiplied, mixed), dim=1).flatten(0, 1)


def _round_keys(key: Tensor) -> Tensor:
    """[PHILOX_ROUNDS, 2, ...]: the key bumped once a round."""
    lead = [1] * (key.dim() - 1)
    steps = torch.tensor(PHILOX_KEY_STEPS, device=key.device).view(1, 2, *lead)
    rounds = torch.arange(PHILOX_ROUNDS, device=key.device).view(PHILOX_ROUNDS, 1, *lead)
    return (key.unsqueeze(0) + rounds * steps).bitwise_and_(_LOW_32)


def noise_bits(seed: Tensor, token_index: Tensor, vocab_size: int) -> Tensor:
    """The bits behind the Gumbel noise of token x of row r: word x mod 4 of the block of counter x div 4.

    Args:
        seed: [R] int64, the bits of a uint64. token_index: [R] int64.
    Returns:
        [R, vocab_size] int64, each in [0, 2^32).
    """
    num_rows, num_blocks = seed.numel(), (vocab_size + 3) // 4
    counter = torch.empty(4, num_rows, num_blocks, dtype=torch.int64, device=seed.device)
    counter[0] = (token_index & _LOW_32)[:, None]
    counter[1] = torch.arange(num_blocks, device=seed.device)
    counter[2] = SAMPLE_INDEX
    counter[3] = 0
    key = torch.stack((seed & _LOW_32, (seed >> 32) & _LOW_32))[:, :, None]
    return philox4x32(counter, key).permute(1, 2, 0).reshape(num_rows, 4 * num_blocks)[:, :vocab_size]
