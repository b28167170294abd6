"""The device, kernels and dtype with which the models compute, as the settings and this machine say."""

from dataclasses import dataclass

import torch

from kimi_backend.config.settings import ServingSettings
from kimi_backend.errors import ConfigError
from kimi_kernels.kernel_set import KernelSet

_DEVICES_OF_KERNELS = {"plain": ("cpu", "cuda"), "triton": ("cuda",)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The device, kernels and dtype with which a model computes."""

    device: torch.device
    kernels: KernelSet
    dtype: torch.dtype
    kv_dtype: torch.dtype


def place(settings: ServingSettings, rank: int = 0) -> Placement:
    """Resolve every "auto", and take as many CPU threads as the settings say.

    Args:
        rank: of the `tensor_parallel_size` that share the models.

    Raises:
        ConfigError: there are fewer GPUs than asked for, or the kernels cannot run on the device.
    """
    has_gpu = torch.cuda.is_available()
    name = settings.device if settings.device != "auto" else ("cuda" if has_gpu else "cpu")
    if name == "cuda" and not has_gpu:
        raise ConfigError("setting device: cuda given, but torch sees no GPU here; cpu is allowed")
    chosen = settings.kernels if settings.kernels != "auto" else ("triton" if name == "cuda" else "plain")
    if name not in _DEVICES_OF_KERNELS[chosen]:
        allowed = " or ".join(kernels for kernels, devices in _DEVICES_OF_KERNELS.items() if name in devices)
        raise ConfigError(f"setting kernels: {chosen} given, which does not run on {name}; {allowed} is allowed there")
    if name == "cpu":
        torch.set_num_threads(settings.cpu_threads)
    kernels: KernelSet = getattr(KernelSet, chosen)()
    dtype = torch.bfloat16 if chosen == "triton" else torch.float32
    kv_dtype = _kv_dtype(settings, dtype, chosen)
    return Placement(device=_device(settings, name, rank), kernels=kernels, dtype=dtype, kv_dtype=kv_dtype)


def _device(settings: ServingSettings, name: str, rank: int) -> torch.device:
    """Each rank has a GPU of its own. On a CPU they share the machine."""
    size = settings.tensor_parallel_size
    if name != "cuda" or size == 1:
        return torch.device(name)
    num_gpus = torch.cuda.device_count()
    if size > num_gpus:
        raise ConfigError(
            f"setting tensor_parallel_size: {size} given, torch sees {num_gpus} GPUs here; 1 to {num_gpus} are allowed"
        )
    kinds = [torch.cuda.get_device_name(index) for index in range(size)]
    if len(set(kinds)) > 1:
        # Kernels divide their work by the card, and every rank must get the same bits.
        raise ConfigError(
            f"setting tensor_parallel_size: {size} given, the first {size} GPUs are {', '.join(kinds)}; GPUs of"
            " one kind are allowed (CUDA_VISIBLE_DEVICES chooses)"
        )
    return torch.device(name, rank)


def _kv_dtype(settings: ServingSettings, dtype: torch.dtype, kernels: str) -> torch.dtype:
    if settings.kv_cache_dtype == "auto":
        return dtype
    if settings.kv_cache_dtype != "fp8":
        kv_dtype: torch.dtype = getattr(torch, settings.kv_cache_dtype)
        return kv_dtype
    if kernels != "triton":
        raise ConfigError(
            f"setting kv_cache_dtype: fp8 given, which the {kernels} kernels do not serve; auto is allowed"
        )
    return torch.float8_e4m3fn


def captures_steps(settings: ServingSettings, placement: Placement) -> bool:
    """Tell whether steps are captured as CUDA graphs: where the kernels never wait for the device."""
    on_gpu = placement.device.type == "cuda" and placement.kernels.name == "triton"
    return on_gpu and settings.enforce_eager == "false"
