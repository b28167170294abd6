"""The name of a runner's device in the handshake."""

import torch


def device_name(device: torch.device) -> str:
    """ "cpu", or the GPU's UUID: the same for two processes on one GPU, whatever each may see."""
    if device.type != "cuda":
        return device.type
    return str(torch.cuda.get_device_properties(device).uuid)
