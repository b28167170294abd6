"""Philox 4x32-10 in int64 arithmetic, and the 32 noise bits of every token (docs/sampling.md, "Noise bits")."""

from functools import cache, lru_cache

import torch
from torch import Tensor

from kimi_kernels.sampling.constants import PHILOX_KEY_STEPS, PHILOX_MULTIPLIERS, PHILOX_ROUNDS, SAMPLE_INDEX

_LOW_32 = 0xFFFFFFFF


@cache
def _numbers(values: tuple[int, ...], device: torch.device) -> Tensor:
    """Constants as tensors, kept: wrapping a Python number costs as much as the operation it is for."""
    return torch.tensor(values, dtype=torch.int64, device=device)


def philox4x32(counter: Tensor, key: Tensor) -> Tensor:
    """Ten rounds of Philox 4x32 (Salmon et al. 2011).

    Args:
        counter: [4, ...] int64, each word in [0, 2^32).
        key: [2, ...] int64, each word in [0, 2^32), as many dimensions as `counter`; broadcasts.
    Returns:
        [4, ...] int64, each word in [0, 2^32).
    """
    device, lead = counter.device, [1] * (counter.dim() - 1)
    low_32, half = _numbers((_LOW_32,), device), _numbers((32,), device)
    multipliers = _numbers(PHILOX_MULTIPLIERS, device).view(2, *lead)
    # Words 0 and 2 are multiplied; a product wraps at 64 bits, which keeps both of its halves right.
    multiplied, mixed = counter[0::2], counter[1::2]
    for round_key in _round_keys(key).unbind(0):
        products = (multiplied * multipliers).flip(0)
        multiplied = (products >> half).bitwise_and_(low_32).bitwise_xor_(mixed).bitwise_xor_(round_key)
        mixed = products.bitwise_and_(low_32)
    return torch.stack((multiplied, mixed), dim=1).flatten(0, 1)


def _round_keys(key: Tensor) -> Tensor:
    """[PHILOX_ROUNDS, 2, ...]: the key bumped once a round."""
    lead = [1] * (key.dim() - 1)
    steps = _numbers(PHILOX_KEY_STEPS, key.device).view(1, 2, *lead)
    rounds = _numbers(tuple(range(PHILOX_ROUNDS)), key.device).view(PHILOX_ROUNDS, 1, *lead)
    return (key.unsqueeze(0) + rounds * steps).bitwise_and_(_numbers((_LOW_32,), key.device))


def noise_bits(seed: Tensor, token_index: Tensor, vocab_size: int) -> Tensor:
    """The bits behind the Gumbel noise of token x of row r: word x mod 4 of the block of counter x div 4.

    Args:
        seed: [R] int64, the bits of a uint64. token_index: [R] int64.
    Returns:
        [R, vocab_size] int64, each in [0, 2^32).
    """
    num_rows, num_blocks = seed.numel(), (vocab_size + 3) // 4
    counter = torch.zeros(4, num_rows, num_blocks, dtype=torch.int64, device=seed.device)
    counter[0] = (token_index & _LOW_32)[:, None]
    counter[1] = _blocks(num_blocks, seed.device)
    if SAMPLE_INDEX:
        counter[2] = SAMPLE_INDEX
    key = torch.stack((seed, seed >> 32)).bitwise_and_(_LOW_32)[:, :, None]
    return philox4x32(counter, key).permute(1, 2, 0).reshape(num_rows, 4 * num_blocks)[:, :vocab_size]


@lru_cache(maxsize=8)
def _blocks(num_blocks: int, device: torch.device) -> Tensor:
    return torch.arange(num_blocks, device=device)
