"""Marks of tests that run Triton-language kernels in its interpreter, on a CPU."""

import pytest
import torch

INTERPRETED = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is there: the gpu tests run compiled kernels"),
    # The interpreter turns one-element arrays into loop bounds in a way that newer numpy dislikes.
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning"),
    # Lanes that a mask discards afterwards.
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
]
