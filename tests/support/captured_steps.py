"""Comparison of captured steps with plain ones, and steps of some sequences in an order."""

from dataclasses import fields

import numpy as np
import torch

from kimi_backend.types.plan import AuxHandle
from support.speculative_loop import SpeculativeLoop, Step


def assert_equal_steps(plain: Step, captured: Step) -> None:
    """Replies of both runners, bit for bit, and the aux hidden states of every row."""
    for ours, theirs in ((captured.target_reply, plain.target_reply), (captured.draft_reply, plain.draft_reply)):
        assert ours is not None and theirs is not None
        for field in fields(ours):
            value, expected = getattr(ours, field.name), getattr(theirs, field.name)
            if isinstance(expected, np.ndarray):
                np.testing.assert_array_equal(value, expected, err_msg=field.name)
                assert value.dtype == expected.dtype
            elif isinstance(expected, AuxHandle):
                assert torch.equal(value.tensor, expected.tensor)


def step_in_order(loop: SpeculativeLoop, order: list[int], chunk_size: int = 10**6) -> Step:
    """A step of some sequences only, as they stand in `order`."""
    everyone = loop.sequences
    loop.sequences = [everyone[index] for index in order]
    step = loop.step(chunk_size)
    loop.sequences = everyone
    return step
