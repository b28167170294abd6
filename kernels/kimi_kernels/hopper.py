"""The devices that take the kernels written for Hopper's own instructions."""

import functools

import torch


@functools.lru_cache(maxsize=16)
def is_hopper(device: torch.device) -> bool:
    """Tell whether this is an H100, an H200 or another of compute capability 9; False on a CPU."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9
