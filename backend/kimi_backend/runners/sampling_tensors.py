"""The plan's sampling parameters as the tensors that the sampling ops read."""

from collections.abc import Mapping
from dataclasses import fields

import numpy as np
import torch

from kimi_backend.runners.host_transfer import Arrays, to_device
from kimi_backend.types.plan import SamplingPlan
from kimi_kernels.sampling_inputs import SamplingInputs

NAMES = tuple(field.name for field in fields(SamplingPlan))


def sampling_arrays(plan: SamplingPlan) -> Arrays:
    """The plan's arrays by name, for `host_transfer.to_device`."""
    return {name: getattr(plan, name) for name in NAMES}


def sampling_inputs(tensors: Mapping[str, torch.Tensor]) -> SamplingInputs:
    """The same on the device, from what `to_device` returned."""
    return SamplingInputs(**{name: tensors[name] for name in NAMES})


class SamplingUpload:
    """The parameters on a device, moved there once as long as the builder of plans gives the same object."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._plan: SamplingPlan | None = None
        self._inputs: SamplingInputs | None = None
        self._moves_logits = False

    def inputs(self, plan: SamplingPlan) -> SamplingInputs:
        """The plan's parameters as tensors, which are not to be written to."""
        if self._inputs is None or plan is not self._plan:
            self._inputs = sampling_inputs(to_device(sampling_arrays(plan), self._device))
            self._moves_logits = has_processors(plan)
            self._plan = plan
        return self._inputs

    def moves_logits(self, plan: SamplingPlan) -> bool:
        """`has_processors`, found out once likewise."""
        self.inputs(plan)
        return self._moves_logits


def has_processors(plan: SamplingPlan) -> bool:
    """Tell whether anything moves a logit: penalty, bias, ban or bad word. Temperature and filters do not move the
    largest one."""
    return bool(
        len(plan.bias_ids)
        or len(plan.ban_ids)
        or len(plan.bad_word_tokens)
        or np.count_nonzero(plan.repetition_penalty != 1)
        or np.count_nonzero(plan.frequency_penalty)
        or np.count_nonzero(plan.presence_penalty)
    )
