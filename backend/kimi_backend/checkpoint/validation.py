"""Compare a checkpoint with its config before anything is loaded; everything wrong is listed in one error."""

import torch

from kimi_backend.checkpoint.model_specs import draft_tensor_specs, target_tensor_specs
from kimi_backend.checkpoint.tensor_source import TensorSource
from kimi_backend.checkpoint.tensor_spec import Specs
from kimi_backend.checkpoint.vocabulary_map import draft_token_ids
from kimi_backend.config.draft_config import (
    NO_OVERRIDES,
    DraftOverrides,
    Eagle3MhaDraftConfig,
    Eagle3MlaDraftConfig,
)
from kimi_backend.config.model_config import KimiModelConfig
from kimi_backend.errors import CheckpointError

_IGNORED_SUFFIXES = (".rotary_emb.inv_freq", ".input_scale")
"""Buffers that older exporters saved, as rope is computed from the config; scales of activations, which are not
quantised here."""


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
    """Does for a draft what `validate_target` does, and checks the vocabulary maps.

    Args:
        source: under canonical names (`canonical_tensors.CanonicalTensors`).
        overrides: those that `config` was read with.
    """
    specs = draft_tensor_specs(config, overrides)
    # Only the first layer norms the hidden state apart; trainers make that norm for all.
    unused = tuple(f"layers.{layer}.hidden_norm." for layer in range(1, config.num_hidden_layers))
    problems = compare_names(specs, source, unused)
    problems += compare_tensors(specs, source)
    _raise_if_any(subject, problems)
    draft_token_ids(source, config.draft_vocab_size, config.vocab_size, subject)


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
        if not spec.takes(shape):
            problems.append(f"{name}: expected shape {list(spec.shape)}, found {list(shape)}")
        if dtype not in spec.dtypes:
            problems.append(f"{name}: expected {_dtype_names(spec.dtypes)}, found {_dtype_names((dtype,))}")
    return sorted(problems)


def _raise_if_any(subject: str, problems: list[str]) -> None:
    if problems:
        raise CheckpointError(subject, problems)


def _describe(shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...]) -> str:
    return f"{list(shape)} {_dtype_names(dtypes)}"


def _dtype_names(dtypes: tuple[torch.dtype, ...]) -> str:
    return " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
