"""A verify step's plan as the static arrays of a bucket, padding included."""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kimi_backend.runners.graphs.buckets import Bucket
from kimi_backend.runners.graphs.static_arrays import ArrayLayout, HostArrays
from kimi_backend.runners.left_tokens import left_places, window_rows
from kimi_backend.runners.row_arrays import RowArrays
from kimi_backend.types.plan import PLACEHOLDER_TOKEN_ID, SamplingPlan, TargetPlan
from kimi_kernels.sampling_inputs import SamplingInputs

SAMPLING_SPECS: dict[str, tuple[npt.DTypeLike, float]] = {
    "temperature": (np.float32, 0.0),
    "top_k": (np.int32, 0),
    "top_p": (np.float32, 1.0),
    "min_p": (np.float32, 0.0),
    "seed": (np.int64, 0),
}
"""Parameters that a captured draw reads, and what a padded sequence has."""


def target_layout(bucket: Bucket, left_shape: tuple[int, int] = (0, 0)) -> ArrayLayout:
    """T rows, B sequences, W draft tokens.

    `tokens` holds a placeholder, the plan's tokens by row, and room for what a draft leaves, of `left_shape`; the step
    picks its rows' tokens and its windows out of it by place. In a step that is launched behind another one, which has
    no draft tokens, that room's row 0 holds what the other one drew.
    """
    rows, seqs = (bucket.num_rows,), (bucket.num_seqs,)
    return ArrayLayout.of(
        {
            "tokens": ((1 + bucket.num_rows + left_shape[0] * left_shape[1],), np.int32),
            "token_places": (rows, np.int64),
            "positions": (rows, np.int64),
            "slots": (rows, np.int64),
            "aux_rows": (rows, np.int64),
            "cu_seqlens": ((bucket.num_seqs + 1,), np.int32),
            "seq_lens": (seqs, np.int32),
            "sequence": (rows, np.int64),
            "token_index": (rows, np.int64),
            "window_len": (rows, np.int32),
            "first_row": (seqs, np.int64),
            "num_draft_tokens": (seqs, np.int32),
            "window_places": ((bucket.num_seqs, bucket.query_len - 1), np.int64),
            **{name: (seqs, dtype) for name, (dtype, _) in SAMPLING_SPECS.items()},
        }
    )


def pad_target(arrays: HostArrays, num_rows: int, num_seqs: int) -> None:
    """Everything from row `num_rows` and sequence `num_seqs` on: rows that write nothing, sequences without a key.

    Args:
        num_rows, num_seqs: of the plan.
    """
    total_rows, total_seqs = len(arrays["token_places"]), len(arrays["seq_lens"])
    arrays["cu_seqlens"][0] = 0
    arrays["tokens"][0] = PLACEHOLDER_TOKEN_ID
    if num_rows < total_rows:
        for name in ("token_places", "positions", "token_index", "window_len"):
            arrays[name][num_rows:] = 0
        arrays["slots"][num_rows:] = -1
        # Non-decreasing, as the draw wants it.
        arrays["sequence"][num_rows:] = total_seqs - 1
    if num_seqs < total_seqs:
        arrays["cu_seqlens"][num_seqs + 1 :] = num_rows
        arrays["seq_lens"][num_seqs:] = 0
        # A row that there is, whatever it drew.
        arrays["first_row"][num_seqs:] = total_rows - 1
        arrays["num_draft_tokens"][num_seqs:] = 0
        arrays["window_places"][num_seqs:] = 0
        pad_sampling(arrays, num_seqs)


def fill_target(
    arrays: HostArrays, plan: TargetPlan, rows: RowArrays, first_aux_row: int, num_left_columns: int = 0
) -> None:
    """Write a checked plan whose sequences all sample.

    Args:
        first_aux_row: where the step's region of aux hidden states begins.
        num_left_columns: of the array that a draft's tokens are copied into.
    """
    num_rows, num_seqs = len(rows.sequence), len(rows.ends)
    counts = plan.num_sampled_rows
    first_row = rows.ends - counts
    total_rows = len(arrays["token_places"])
    places = arrays["token_places"]
    arrays["tokens"][1 : num_rows + 1] = plan.rows.token_ids
    places[:num_rows] = np.arange(1, num_rows + 1)
    if plan.draft_columns is not None:
        left = left_places(plan, num_left_columns)
        np.copyto(places[:num_rows], left + (1 + total_rows), where=left >= 0)
    elif plan.drawn_rows is not None:
        places[:num_rows] = plan.drawn_rows
        places[:num_rows] += 1 + total_rows
    arrays["positions"][:num_rows] = rows.positions
    arrays["slots"][:num_rows] = rows.slots
    arrays["aux_rows"][:] = np.arange(first_aux_row, first_aux_row + len(arrays["aux_rows"]))
    arrays["cu_seqlens"][1 : num_seqs + 1] = rows.ends
    arrays["seq_lens"][:num_seqs] = plan.rows.seq_lens
    arrays["sequence"][:num_rows] = rows.sequence
    arrays["token_index"][:num_rows] = rows.positions + 1
    arrays["window_len"][:num_rows] = np.maximum(np.arange(num_rows) - first_row[rows.sequence], 0)
    arrays["first_row"][:num_seqs] = first_row
    arrays["num_draft_tokens"][:num_seqs] = counts - 1
    window = window_rows(plan, arrays["window_places"].shape[1])
    arrays["window_places"][:num_seqs] = np.where(window >= 0, places[window], 0)
    fill_sampling(arrays, plan.sampling, num_seqs)
    pad_target(arrays, num_rows, num_seqs)


def fill_sampling(arrays: HostArrays, sampling: SamplingPlan, where: int | npt.NDArray[Any]) -> None:
    """where: how many sequences there are, if all sample; else which ones do."""
    place = slice(where) if isinstance(where, int) else where
    for name in SAMPLING_SPECS:
        arrays[name][place] = getattr(sampling, name)


def pad_sampling(arrays: HostArrays, num_seqs: int) -> None:
    for name, (_, default) in SAMPLING_SPECS.items():
        arrays[name][num_seqs:] = default


def static_sampling_inputs(tensors: dict[str, torch.Tensor], num_seqs: int, device: torch.device) -> SamplingInputs:
    """Parameters of a captured draw: what `SAMPLING_SPECS` names changes, no processor runs."""
    zeros = torch.zeros(num_seqs + 1, dtype=torch.int32, device=device)
    ones = torch.ones(num_seqs, dtype=torch.float32, device=device)
    no_ids = torch.empty(0, dtype=torch.int32, device=device)
    no_values = torch.empty(0, dtype=torch.float32, device=device)
    return SamplingInputs(
        **{name: tensors[name] for name in SAMPLING_SPECS},
        repetition_penalty=ones,
        frequency_penalty=torch.zeros_like(ones),
        presence_penalty=torch.zeros_like(ones),
        penalty_offsets=zeros,
        penalty_ids=no_ids,
        penalty_counts=no_ids,
        penalty_in_prompt=no_ids.bool(),
        bias_offsets=zeros,
        bias_ids=no_ids,
        bias_values=no_values,
        ban_offsets=zeros,
        ban_ids=no_ids,
        ban_until=no_ids.long(),
        bad_word_offsets=zeros,
        bad_word_token_offsets=zeros[:1],
        bad_word_tokens=no_ids,
        history_tail=torch.full((num_seqs, 1), PLACEHOLDER_TOKEN_ID, dtype=torch.int32, device=device),
    )
