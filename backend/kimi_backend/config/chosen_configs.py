"""The configs that the settings name, read without torch, and what of them and of this machine cannot be served."""

import ctypes
from dataclasses import dataclass

from kimi_backend.config.draft_config import DraftOverrides, Eagle3DraftConfig
from kimi_backend.config.model_config import KimiModelConfig
from kimi_backend.config.settings import ServingSettings
from kimi_backend.errors import ConfigError


def draft_overrides(settings: ServingSettings) -> DraftOverrides:
    """Return what the operator sets against the draft's config.json.

    Raises:
        ConfigError: aux_layer_ids is not a list of integers.
    """
    flags = {"": None, "true": True, "false": False}
    return DraftOverrides(
        rope_theta=settings.draft_rope_theta or None,
        beta_fast=settings.draft_beta_fast or None,
        interleaved=flags[settings.draft_interleaved],
        fc_norm=flags[settings.draft_fc_norm],
        norm_output=flags[settings.draft_norm_output],
        aux_layer_ids=_parse_layer_ids(settings.aux_layer_ids),
    )


def _parse_layer_ids(text: str) -> tuple[int, ...] | None:
    if not text:
        return None
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"setting aux_layer_ids: {text!r} given, integers separated by commas are needed") from None


@dataclass(frozen=True, slots=True)
class ChosenConfigs:
    """The target's, and the draft's if there is one."""

    target: KimiModelConfig
    draft: Eagle3DraftConfig | None

    @classmethod
    def read(cls, settings: ServingSettings) -> "ChosenConfigs":
        """
        Raises:
            ConfigError: no checkpoint is named, or a config.json is absent or says what cannot be served.
        """
        if not settings.checkpoint:
            raise ConfigError("setting checkpoint: empty, the folder of a checkpoint is needed")
        target = KimiModelConfig.from_hf_json(settings.checkpoint)
        if not settings.draft:
            return cls(target, None)
        return cls(target, Eagle3DraftConfig.from_hf_json(settings.draft, target, draft_overrides(settings)))


def check_gpus(settings: ServingSettings) -> None:
    """Refuse settings that need more GPUs than the CUDA driver shows, in milliseconds: torch takes seconds to look.

    Raises:
        ConfigError: there are fewer.
    """
    needed = settings.tensor_parallel_size if settings.device == "cuda" else 0
    found = _num_gpus() if needed else 0
    if needed > found:
        hint = "cpu is allowed" if not found else f"1 to {found} are allowed"
        name, given = ("device", "cuda") if not found else ("tensor_parallel_size", str(needed))
        raise ConfigError(f"setting {name}: {given} given, but the CUDA driver shows {found or 'no'} GPUs here; {hint}")


def _num_gpus() -> int:
    """0 without a driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int()
    is_running = driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0
    return count.value if is_running else 0
