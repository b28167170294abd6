"""The settings that `probe.probing` tries: readings of the aux ids × rotary variants × norm flags."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from kimi_backend.config.draft_config import DraftOverrides, Eagle3DraftConfig

COMMON_THETAS = (10_000.0, 50_000.0, 1_000_000.0)
COMMON_BETA_FASTS = (1.0, 32.0)


_Variant = tuple[str, dict[str, Any]]
"""Name, and the overrides that make it; none for the file's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeSetting:
    """One way to read a draft's file."""

    aux: str
    rope: str
    norms: str
    overrides: DraftOverrides
    is_files_own: bool

    @property
    def name(self) -> str:
        return f"aux {self.aux}; rope {self.rope}; {self.norms}"

    @property
    def num_overrides(self) -> int:
        """Fields of the file that it sets against."""
        return sum(getattr(self.overrides, field.name) is not None for field in fields(self.overrides))


def candidate_settings(config: Eagle3DraftConfig, num_target_layers: int, has_fc_norm: bool) -> list[ProbeSetting]:
    """Both readings of the aux ids × rotary variants × norm flags, the file's own setting first.

    Args:
        config: as the file says.
        has_fc_norm: the file holds `fc_norm` weights, so that the flag may be on.
    """
    settings = []
    for aux, rope, norms in itertools.product(
        _aux_readings(config, num_target_layers), _rope_variants(config), _norm_flags(config, has_fc_norm)
    ):
        own = not aux[1] and not rope[1] and not norms[1]
        overrides = DraftOverrides(**aux[1], **rope[1], **norms[1])
        settings.append(ProbeSetting(aux=aux[0], rope=rope[0], norms=norms[0], overrides=overrides, is_files_own=own))
    return sorted(settings, key=lambda setting: not setting.is_files_own)


def layers_to_keep(settings: Sequence[ProbeSetting], config: Eagle3DraftConfig) -> tuple[int, ...]:
    """Every R(j) that any setting reads."""
    read = {j for setting in settings for j in setting.overrides.aux_layer_ids or config.aux_layer_ids}
    return tuple(sorted(read))


def _aux_readings(config: Eagle3DraftConfig, num_target_layers: int) -> list[_Variant]:
    ids = config.aux_layer_ids
    readings: list[_Variant] = [(_layers(ids), {})]
    for shift in (1, -1):
        moved = tuple(j + shift for j in ids)
        if moved[0] >= 0 and moved[-1] <= num_target_layers:
            readings.append((_layers(moved), {"aux_layer_ids": moved}))
    return readings


def _layers(ids: Sequence[int]) -> str:
    return ",".join(f"R({j})" for j in ids)


def _rope_variants(config: Eagle3DraftConfig) -> list[_Variant]:
    rope = config.rope
    variants: list[_Variant] = [("as the file", {})]
    variants.append(
        ("half-split pairs" if rope.interleaved else "interleaved pairs", {"interleaved": not rope.interleaved})
    )
    variants += [(f"theta {theta:g}", {"rope_theta": theta}) for theta in COMMON_THETAS if theta != rope.theta]
    if rope.is_yarn:
        fasts = [beta for beta in COMMON_BETA_FASTS if beta != rope.beta_fast and beta >= rope.beta_slow]
        variants += [(f"beta_fast {beta:g}", {"beta_fast": beta}) for beta in fasts]
    return variants


def _norm_flags(config: Eagle3DraftConfig, has_fc_norm: bool) -> list[_Variant]:
    variants: list[_Variant] = []
    for norm_output, fc_norm in itertools.product((False, True), (False, True)):
        if fc_norm and not has_fc_norm:
            continue
        overrides: dict[str, Any] = {}
        if norm_output != config.norm_output:
            overrides["norm_output"] = norm_output
        if fc_norm != config.fc_norm:
            overrides["fc_norm"] = fc_norm
        variants.append((f"fc_norm {_word(fc_norm)}, norm_output {_word(norm_output)}", overrides))
    return variants


def _word(flag: bool) -> str:
    return "on" if flag else "off"
