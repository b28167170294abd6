"""Programmatic dependent launch, PDL (compute capability 9.0 and up): a kernel's blocks start while the kernel before
it in the stream still runs, and wait inside (`gdc_wait`) before they touch memory. Hides a launch's latency in a graph.
"""

import functools

import torch


@functools.lru_cache(maxsize=16)
def has_dependent_launch(device: torch.device) -> bool:
    """Tell whether kernels on this device are launched so; False on a CPU, in Triton-language's interpreter."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def pdl_options(device: torch.device) -> dict[str, bool]:
    """Launch options of a kernel whose constant PDL says whether it has to wait."""
    return {"PDL": True, "launch_pdl": True} if has_dependent_launch(device) else {"PDL": False}
