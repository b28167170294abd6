"""Triton-language's interpreter in tests: marks of those that run kernels in it, on a CPU."""

from types import SimpleNamespace

import pytest
import torch
import triton.language as tl
from triton.runtime import interpreter

INTERPRETED = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is there: the gpu tests run compiled kernels"),
    # The interpreter turns one-element arrays into loop bounds in a way that newer numpy dislikes.
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning"),
    # Lanes that a mask discards afterwards.
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
]


def _patch_language_once() -> None:
    """Leave Triton-language as its interpreter patches it, which else does so at each call of a device function.

    That took two fifths of these tests' time. The scopes of those calls are never restored either.
    """
    interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    interpreter._patch_lang = lambda function: interpreter._LangPatchScope()


if not torch.cuda.is_available():
    _patch_language_once()
