"""Compare a checkpoint with its config before anything is loaded; everything wrong is listed in one error."""

import torch

from kimi_backend.checkpoint.model_specs import draft_tensor_specs, target_tensor_specs
from kimi_backend.checkpoint.tensor_source import TensorSource
from kimi_backend.checkpoint.tensor_spec import Specs
from kimi_backend.config.draft_config import (
    NO_OVERRIDES,
    DraftOverrides,
    Eagle3DraftConfig,
    Eagle3MhaDraftConfig,
    Eagle3MlaDraftConfig,
)
from kimi_backend.config.model_config import KimiModelConfig
from kimi_backend.errors import CheckpointError

_IGNORED_SUFFIXES = (".rotary_emb.inv_freq",)
"""Buffers that older exporters saved; rope is computed from the config."""


def validate_target(config: KimiModelConfig, source: TensorSource, subject: str) -> None:
    """Check names, shapes and dtypes.

    Args:
        subject: what the error calls the checkpoint, such as its path.
    Raises:
        CheckpointError: with one line for each thing found wrong.
    """
    specs = target_tensor_specs(config)
    first_extra = config.num_hidden_layers
    skipped = tuple(f"model.layers.{first_extra + i}." for i in range(config.num_nextn_predict_layers))
    problems = compare_names(specs, source, skipped)
    problems += compare_tensors(specs, source)
    _raise_if_any(subject, problems)


def validate_draft(
    config: Eagle3MlaDraftConfig | Eagle3MhaDraftConfig,
    source: TensorSource,
    subject: str,
    overrides: DraftOverrides = NO_OVERRIDES,
) -> None:
    """As `validate_target`, and the vocabulary maps.

    Args:
        source: under canonical names (`draft_names.DraftTensors`).
        overrides: those that `config` was read with.
    """
    specs = draft_tensor_specs(config, overrides)
    problems = compare_names(specs, source)
    problems += compare_tensors(specs, source)
    _raise_if_any(subject, problems)
    _raise_if_any(subject, check_vocabulary_maps(config, source))


def compare_names(specs: Specs, source: TensorSource, skipped_prefixes: tuple[str, ...] = ()) -> list[str]:
    """One line for each missing and each unexpected tensor."""
    names = source.names()
    problems = [
        f"{name}: missing, expected {_describe(spec.shape, spec.dtypes)}"
        for name, spec in specs.items()
        if spec.is_required and name not in names
    ]
    for name in sorted(names - specs.keys()):
        if not name.startswith(skipped_prefixes) and not name.endswith(_IGNORED_SUFFIXES):
            found = _describe(source.shape(name), (source.dtype(name),))
            problems.append(f"{name}: unexpected, found {found}; the config has no place for it")
    return problems


def compare_tensors(specs: Specs, source: TensorSource) -> list[str]:
    """One line for each tensor of the wrong shape or dtype."""
    problems = []
    for name in source.names() & specs.keys():
        spec = specs[name]
        shape, dtype = source.shape(name), source.dtype(name)
        if shape != spec.shape:
            problems.append(f"{name}: expected shape {list(spec.shape)}, found {list(shape)}")
        if dtype not in spec.dtypes:
            problems.append(f"{name}: expected {_dtype_names(spec.dtypes)}, found {_dtype_names((dtype,))}")
    return sorted(problems)


def check_vocabulary_maps(config: Eagle3DraftConfig, source: TensorSource) -> list[str]:
    """`d2t` must map draft ids to rising target ids, and `t2d` mark the same ones.

    `d2t` holds offsets: target id = draft id + d2t[draft id] (0 everywhere for a draft of the full vocabulary).
    """
    names = source.names()
    draft_ids = torch.arange(config.draft_vocab_size)
    target_ids = draft_ids
    if config.draft_vocab_size < config.vocab_size and not names & {"d2t", "t2d"}:
        return [f"d2t: missing, expected [{config.draft_vocab_size}] int64, since draft_vocab_size < vocab_size"]
    problems = []
    if "d2t" in names:
        target_ids = draft_ids + source.read("d2t").long()
        problems += _check_rising(target_ids, config.vocab_size)
    if "t2d" in names and not problems:
        mask = source.read("t2d")
        known = mask.nonzero().flatten()
        if known.numel() != config.draft_vocab_size:
            problems.append(f"t2d: expected {config.draft_vocab_size} target ids marked, found {known.numel()}")
        elif "d2t" in names and not torch.equal(known, target_ids):
            first = int((known != target_ids).nonzero()[0])
            problems.append(
                f"t2d: expected the target ids of d2t, found id {int(known[first])} marked where draft id {first}"
                f" maps to {int(target_ids[first])}"
            )
    return problems


def _check_rising(target_ids: torch.Tensor, vocab_size: int) -> list[str]:
    outside = ((target_ids < 0) | (target_ids >= vocab_size)).nonzero().flatten()
    if outside.numel():
        first = int(outside[0])
        return [
            f"d2t: expected target ids from 0 to {vocab_size - 1}, found {int(target_ids[first])} for draft id {first}"
            " (d2t holds offsets: target id = draft id + d2t[draft id])"
        ]
    falls = (target_ids[1:] <= target_ids[:-1]).nonzero().flatten()
    if falls.numel():
        first = int(falls[0])
        return [
            f"d2t: expected rising target ids, found {int(target_ids[first])} then {int(target_ids[first + 1])}"
            f" for draft ids {first} and {first + 1}"
        ]
    return []


def _raise_if_any(subject: str, problems: list[str]) -> None:
    if problems:
        raise CheckpointError(subject, problems)


def _describe(shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...]) -> str:
    return f"{list(shape)} {_dtype_names(dtypes)}"


def _dtype_names(dtypes: tuple[torch.dtype, ...]) -> str:
    return " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
