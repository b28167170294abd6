"""The compiled kernels on a GPU: the naive judge's tokens for the same logits, at real vocabulary sizes."""

import random

import pytest
import torch

from support.sampling_logits import assert_draws_as_naive, assert_masks_as_naive

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("seed", range(60))
def test_random_batches(seed: int) -> None:
    from kimi_kernels.sampling.kernel import sample_tokens

    vocab_size = random.Random(seed).choice([5, 33, 65, 1000, 2049, 32_000])
    assert_draws_as_naive(sample_tokens, seed, vocab_size, num_sequences=3, device="cuda")


@pytest.mark.parametrize("seed", range(100, 106))
def test_full_vocabulary(seed: int) -> None:
    from kimi_kernels.sampling.kernel import sample_tokens

    assert_draws_as_naive(sample_tokens, seed, 163_840, num_sequences=2, device="cuda")


@pytest.mark.parametrize("vocab_size", [33, 2049, 163_840])
def test_masks_in_place(vocab_size: int) -> None:
    from kimi_kernels.sampling.kernel import mask_logits

    assert_masks_as_naive(mask_logits, vocab_size, device="cuda")


def test_noise_bit_for_bit() -> None:
    """Torch on the GPU, and the kernel through a call whose only difference between tokens is the noise."""
    from kimi_kernels.sampling.gumbel import gumbel_from_bits
    from kimi_kernels.sampling.philox import noise_bits

    seed, index = torch.tensor([-5]), torch.tensor([77])
    on_host = gumbel_from_bits(noise_bits(seed, index, 163_840))
    on_device = gumbel_from_bits(noise_bits(seed.cuda(), index.cuda(), 163_840))
    assert torch.equal(on_host, on_device.cpu())
