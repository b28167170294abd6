"""Philox against Random123's published known answers, and what noise bits depend on."""

import pytest
import torch

from kimi_kernels.sampling.philox import noise_bits, philox4x32

ONES = 0xFFFFFFFF
# Random123, examples/kat_vectors, "philox4x32 10": counter, key, result.
KNOWN_ANSWERS = {
    "zeros": ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    "ones": ((ONES,) * 4, (ONES,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    "pi": (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
}


@pytest.mark.parametrize("name", KNOWN_ANSWERS)
def test_known_answers(name: str) -> None:
    counter, key, expected = KNOWN_ANSWERS[name]
    assert tuple(philox4x32(torch.tensor(counter), torch.tensor(key)).tolist()) == expected


def test_known_answers_in_one_call() -> None:
    counters, keys, expected = (torch.tensor(column).T for column in zip(*KNOWN_ANSWERS.values(), strict=True))
    assert torch.equal(philox4x32(counters.contiguous(), keys.contiguous()), expected)


def test_token_x_takes_word_x_mod_4_of_block_x_div_4() -> None:
    seed, index = 0x299F31D0_A4093822, 0x243F6A88
    bits = noise_bits(torch.tensor([seed]), torch.tensor([index]), 11)[0].tolist()
    key = torch.tensor([0xA4093822, 0x299F31D0])
    expected = [philox4x32(torch.tensor([index, x // 4, 0, 0]), key)[x % 4].item() for x in range(11)]
    assert bits == expected


def test_bits_depend_on_seed_index_and_token_only() -> None:
    """They do not depend on the rows beside it, nor on how many tokens the vocabulary has."""
    seed, index = torch.tensor([5, -1, 5, 2**62]), torch.tensor([0, 9, 1, 2**31])
    together = noise_bits(seed, index, 66)
    for row in range(4):
        alone = noise_bits(seed[row : row + 1], index[row : row + 1], 33)
        assert torch.equal(alone[0], together[row, :33])
    assert together.unique().numel() == together.numel()
    assert together.min() >= 0 and together.max() < 2**32


def test_every_bit_of_the_seed_matters() -> None:
    seeds = torch.tensor([0, *(1 << bit for bit in range(63)), -(2**63)])
    first_words = noise_bits(seeds, torch.zeros(65, dtype=torch.int64), 4)[:, 0]
    assert first_words.unique().numel() == 65
