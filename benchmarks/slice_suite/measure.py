"""One case: a batch of equal requests through the engine, then its steady rounds again without one."""

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import torch

from kernel_cases import Ceilings
from kimi_backend.config.draft_config import Eagle3DraftConfig, Eagle3MlaDraftConfig
from kimi_backend.config.model_config import KimiModelConfig
from kimi_backend.config.settings import ServingSettings
from slice_suite.floor import Load, draft_bytes, target_bytes
from slice_suite.gpu_time import profile_end, profile_rounds
from slice_suite.in_process import run_batch
from slice_suite.recording import Round, replay
from slice_suite.scripted_matches import MatchScript

NUM_WARM_ROUNDS = 3
NUM_PROFILED_ROUNDS = 8
WARM_UP_TOKENS = 12


def measure_case(
    models: tuple[Any, Any | None],
    settings: ServingSettings,
    ceilings: Ceilings | None,
    *,
    batch_size: int,
    prompt_len: int,
    num_output_tokens: int,
    num_speculative_tokens: int,
    is_profiled: bool,
    num_ranks: int = 1,
    num_masked: int = 0,
    masked_by: str = "grammar",
    matches: str | None = None,
) -> dict[str, Any]:
    """Everything that is measured of one case, as JSON values.

    Args:
        num_ranks: the models are one rank's (`one_of_ranks`). It has the embeddings of the first tokens only: prompts
            are of those, and what is drawn is among them.
        num_masked, masked_by: see `run_batch`; such a case is run through the engine only.
        matches: a `MatchScript`, likewise.
    """
    target, draft = models[0], models[1] if num_speculative_tokens else None
    shape: dict[str, Any] = {
        "batch_size": batch_size,
        "prompt_len": prompt_len,
        "num_speculative_tokens": num_speculative_tokens,
    }
    run = partial(run_batch, target, draft, settings, vocab_size=target.describe().vocab_size // num_ranks, **shape)
    if num_masked:
        run = partial(run, num_masked=num_masked, masked_by=masked_by)
        shape |= {"num_masked": num_masked, "masked_by": masked_by}
    if matches is not None:
        run = partial(run, matches=MatchScript.parse(matches))
        shape |= {"matches": matches}
    run(num_output_tokens=WARM_UP_TOKENS, seed=1)
    rounds = run(num_output_tokens=num_output_tokens, keeps_plans=True)
    steady = steady_rounds(rounds, batch_size, needs_draft=draft is not None and matches is None)
    result = shape | _through_engine(rounds, steady, batch_size)
    if not steady:
        return result
    overlaps = settings.async_scheduling == "true"
    if overlaps:
        overlapped = run(num_output_tokens=num_output_tokens, async_scheduling=True)
        result = _with_overlap(result, overlapped, batch_size)
    if num_masked or matches is not None:
        return result
    for _ in range(2):  # the first pass warms up
        times = replay(target, draft, steady)
    result["replayed_target_ms"] = _median([target_ms for target_ms, _ in times])
    result["replayed_draft_ms"] = _median([draft_ms for _, draft_ms in times])
    if is_profiled and torch.cuda.is_available():
        few = steady[:NUM_PROFILED_ROUNDS]
        result["gpu"] = asdict(profile_rounds(lambda: replay(target, draft, few), len(few)))
        if num_ranks == 1:
            result["gpu_in_engine"] = profile_end(
                lambda: run(num_output_tokens=num_output_tokens, async_scheduling=overlaps),
                result["round_ms"],
                NUM_PROFILED_ROUNDS,
            )
    if ceilings is not None and settings.tensor_parallel_size == 1:  # of one GPU's bytes
        result |= _floors(settings, ceilings, result, num_output_tokens, num_ranks)
    return result


def _with_overlap(lockstep: dict[str, Any], rounds: Sequence[Round], batch_size: int) -> dict[str, Any]:
    """The case with its round as served. The parts of a round, and when a prompt's draft is done, are known in lockstep
    only."""
    steady = steady_rounds(rounds, batch_size, needs_draft=False)
    found = _through_engine(rounds, steady, batch_size)
    names = ("round_ms", "round_p10_ms", "round_p90_ms", "decode_tokens_per_s", "tokens_per_s")
    in_lockstep = {f"lockstep_{name}": lockstep[name] for name in names if name in lockstep}
    return lockstep | {name: found[name] for name in names if name in found} | in_lockstep


def steady_rounds(rounds: Sequence[Round], batch_size: int, *, needs_draft: bool) -> list[Round]:
    """Consecutive rounds in which every sequence decodes and none ends; the first few are left out."""
    steady = [
        item
        for item in rounds
        if item.is_decode and item.num_seqs == batch_size and (item.draft_end_s > 0 or not needs_draft)
    ]
    return steady[NUM_WARM_ROUNDS:] if len(steady) > 2 * NUM_WARM_ROUNDS else steady


def _through_engine(rounds: Sequence[Round], steady: Sequence[Round], batch_size: int) -> dict[str, Any]:
    first_decode = next((i for i, item in enumerate(rounds) if item.is_decode), len(rounds))
    prefill = rounds[:first_decode]
    result: dict[str, Any] = {
        "num_rounds": len(steady),
        "prefill_steps": len(prefill),
        "prefill_ms": _ms(prefill[0].target_start_s, prefill[-1].end_s) if prefill else None,
        "prefill_target_ms": round(sum(item.target_ms for item in prefill), 3),
    }
    if len(steady) < 2:
        return result
    starts = [item.target_start_s for item in steady]
    round_ms = [1e3 * (b - a) for a, b in itertools.pairwise(starts)]
    tokens = [item.num_tokens / batch_size for item in steady]
    tenths = statistics.quantiles(round_ms, n=10) if len(round_ms) > 10 else [min(round_ms), max(round_ms)]
    round_median, target_ms, draft_ms = (
        _median(round_ms),
        _median([item.target_ms for item in steady]),
        _median([item.draft_ms for item in steady]),
    )
    return result | {
        "round_ms": round_median,
        "round_p10_ms": round(tenths[0], 3),
        "round_p90_ms": round(tenths[-1], 3),
        "target_ms": target_ms,
        "draft_ms": draft_ms,
        "host_ms": round(round_median - target_ms - draft_ms, 3),
        "tokens_a_round": round(statistics.mean(tokens), 3),
        "decode_tokens_per_s": round(batch_size * statistics.mean(tokens) / round_median * 1e3, 1),
        "tokens_per_s": round(
            sum(item.num_tokens for item in rounds) / (rounds[-1].end_s - rounds[0].target_start_s), 1
        ),
    }


def _floors(
    settings: ServingSettings, ceilings: Ceilings, result: dict[str, Any], num_output_tokens: int, num_ranks: int
) -> dict[str, Any]:
    config = KimiModelConfig.from_hf_json(settings.checkpoint)
    load = Load(
        batch_size=result["batch_size"],
        context=result["prompt_len"] + num_output_tokens // 2,
        num_draft_tokens=result["num_speculative_tokens"],
    )
    draft = Eagle3DraftConfig.from_hf_json(settings.draft, config)
    assert isinstance(draft, Eagle3MlaDraftConfig), "the slice's draft is an MLA draft"
    by_part = {f"target: {part}": num_bytes for part, num_bytes in target_bytes(config, load, num_ranks).items()}
    of_draft = draft_bytes(draft, settings, load, num_ranks)
    by_part |= {f"draft: {part}": num_bytes for part, num_bytes in of_draft.items()}
    floors = {part: round(num_bytes / ceilings.read_bytes_per_us / 1e3, 4) for part, num_bytes in by_part.items()}
    total = sum(floors.values())
    return {
        "floor_ms": round(total, 3),
        "floor_by_part_ms": floors,
        "of_floor": round(result["round_ms"] / total, 3) if "round_ms" in result else None,
    }


def _median(values: Sequence[float]) -> float:
    return round(statistics.median(values), 4)


def _ms(start_s: float, end_s: float) -> float:
    return round(1e3 * (end_s - start_s), 3)
