"""The descriptions of the two runners, whether they fit together, and the limits that follow."""

from dataclasses import dataclass

from kimi_backend.errors import ConfigError
from kimi_backend.scheduler.settings import SchedulerSettings
from kimi_backend.types.plan import PROTOCOL_VERSION, RunnerDescription

_EQUAL_IN_A_PAIR = ("block_size", "vocab_size", "aux_layer_ids", "hidden_size")
_NOT_LESS_AFTER_A_RESTART = ("max_num_batched_tokens", "max_num_seqs")
_KEPT_OVER_A_RESTART = ("block_size", "vocab_size", "max_model_len", "aux_layer_ids", "hidden_size")


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """The limits that hold for this pair of runners and these settings."""

    block_size: int
    vocab_size: int
    max_model_len: int
    num_target_blocks: int
    num_draft_blocks: int | None
    """None while there is no draft."""
    settings: SchedulerSettings
    """The settings as given, lowered to what the runners can take in one step."""
    synthetic_parts: tuple[str, ...] = ()
    """The synthetic parts of either runner."""


def check_runner(description: RunnerDescription, role: str) -> None:
    """Pass silently if one runner can be worked with.

    Raises:
        ConfigError: another protocol or role, or a pool that cannot hold one longest sequence.
    """
    if description.protocol_version != PROTOCOL_VERSION:
        raise ConfigError(
            f"{role} runner: protocol version {description.protocol_version}, the engine speaks {PROTOCOL_VERSION}"
        )
    if description.role != role:
        raise ConfigError(f"{role} runner: it says that its role is {description.role!r}, expected {role!r}")
    slots = description.num_blocks * description.block_size
    if slots < description.max_model_len:
        raise ConfigError(
            f"{role} runner: its KV pool holds {slots} tokens ({description.num_blocks} blocks of"
            f" {description.block_size}), less than one sequence of max_model_len {description.max_model_len};"
            " give it more memory or lower max_model_len"
        )


def check_pair(target: RunnerDescription, draft: RunnerDescription) -> None:
    """Pass silently if the draft can speculate for the target.

    Raises:
        ConfigError: lists every field that differs, with both values.
    """
    differences = [
        f"{name}: target {getattr(target, name)}, draft {getattr(draft, name)}"
        for name in _EQUAL_IN_A_PAIR
        if getattr(target, name) != getattr(draft, name)
    ]
    if draft.draft_vocab_size is not None and draft.draft_vocab_size > target.vocab_size:
        differences.append(
            f"draft_vocab_size {draft.draft_vocab_size} above the target's vocab_size {target.vocab_size}"
        )
    if draft.max_model_len < target.max_model_len:
        differences.append(
            f"max_model_len: target {target.max_model_len}, draft {draft.max_model_len} (may not be less)"
        )
    if differences:
        raise ConfigError("target and draft do not fit together: " + "; ".join(differences))


def check_same_model(before: RunnerDescription, after: RunnerDescription) -> None:
    """Pass silently if a restarted runner is the one that left, its KV apart, and takes steps no smaller.

    Raises:
        ConfigError: lists every field that changed, with both values.
    """
    changes = [
        f"{name}: {getattr(before, name)} before, {getattr(after, name)} now"
        for name in _KEPT_OVER_A_RESTART
        if getattr(before, name) != getattr(after, name)
    ]
    changes += [
        f"{name}: {getattr(before, name)} before, less now ({getattr(after, name)})"
        for name in _NOT_LESS_AFTER_A_RESTART
        if getattr(after, name) < getattr(before, name)
    ]
    if changes:
        raise ConfigError(f"{after.role} runner came back as another model: " + "; ".join(changes))


def check_limits(description: RunnerDescription, settings: SchedulerSettings) -> None:
    """Pass silently if a runner that comes late takes the steps that are made already.

    Raises:
        ConfigError: names the limit and both values.
    """
    for name in _NOT_LESS_AFTER_A_RESTART:
        if getattr(description, name) < getattr(settings, name):
            raise ConfigError(
                f"{description.role} runner: {name} {getattr(description, name)}, the engine makes steps of up to"
                f" {getattr(settings, name)}"
            )


def resolve(target: RunnerDescription, draft: RunnerDescription | None, settings: SchedulerSettings) -> Geometry:
    """The limits that follow from checked descriptions."""
    runners = [target] if draft is None else [target, draft]
    max_rows = min(settings.max_num_batched_tokens, *(r.max_num_batched_tokens for r in runners))
    max_seqs = min(settings.max_num_seqs, max_rows, *(r.max_num_seqs for r in runners))
    return Geometry(
        block_size=target.block_size,
        vocab_size=target.vocab_size,
        max_model_len=target.max_model_len,
        num_target_blocks=target.num_blocks,
        num_draft_blocks=None if draft is None else draft.num_blocks,
        settings=settings.lowered_to(max_seqs, max_rows),
        synthetic_parts=tuple(dict.fromkeys(part for runner in runners for part in runner.synthetic_parts)),
    )
