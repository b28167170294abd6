"""A target step's plan as the static arrays of two buckets, padding included: of its rows, and of its draws."""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kimi_backend.runners.graphs.buckets import Bucket
from kimi_backend.runners.graphs.chunk_parts import ChunkParts
from kimi_backend.runners.graphs.draws import Draws
from kimi_backend.runners.graphs.row_inputs import fill_rows, pad_rows, row_specs
from kimi_backend.runners.graphs.static_arrays import ArrayLayout, HostArrays
from kimi_backend.runners.row_arrays import RowArrays
from kimi_backend.types.plan import PLACEHOLDER_TOKEN_ID, SamplingPlan, TargetPlan
from kimi_kernels.sampling_inputs import SamplingInputs
from kimi_kernels.token_table import stamp_of

SAMPLING_SPECS: dict[str, tuple[npt.DTypeLike, float]] = {
    "temperature": (np.float32, 0.0),
    "top_k": (np.int32, 0),
    "top_p": (np.float32, 1.0),
    "min_p": (np.float32, 0.0),
    "seed": (np.int64, 0),
}
"""Parameters that a captured draw reads, and what a padded sequence has."""


def forward_layout(bucket: Bucket) -> ArrayLayout:
    """`row_specs`, the rows whose hidden states are kept, and how many tokens B sequences were given."""
    seqs = (bucket.num_seqs,)
    return ArrayLayout.of(
        {
            **row_specs(bucket),
            "kept_rows": ((bucket.num_rows,), np.int64),
            "num_given": (seqs, np.int32),
            "num_draft_tokens": (seqs, np.int32),
            "stamp": ((1,), np.int32),
        }
    )


def draw_layout(bucket: Bucket) -> ArrayLayout:
    """R rows that draw, B sequences."""
    rows, seqs = (bucket.num_rows,), (bucket.num_seqs,)
    return ArrayLayout.of(
        {
            "sequence": (rows, np.int64),
            "token_index": (rows, np.int64),
            "window_len": (rows, np.int32),
            "first_row": (seqs, np.int64),
            "num_draft_tokens": (seqs, np.int32),
            "table_rows": (seqs, np.int64),
            **{name: (seqs, dtype) for name, (dtype, _) in SAMPLING_SPECS.items()},
        }
    )


def pad_forward(arrays: HostArrays, num_rows: int, num_seqs: int, num_parts: int, padding_row: int) -> None:
    """See `pad_rows`."""
    pad_rows(arrays, num_rows, num_seqs, num_parts, padding_row, by_sequence=("num_given", "num_draft_tokens"))


def fill_forward(
    arrays: HostArrays,
    plan: TargetPlan,
    rows: RowArrays,
    parts: ChunkParts,
    draws: Draws,
    first_aux_row: int,
    padding_row: int,
) -> None:
    """Write a checked plan.

    Args:
        first_aux_row: where the step's region of aux hidden states begins.
        padding_row: of the token table.
    """
    num_seqs, num_kept = len(rows.ends), len(draws.rows)
    fill_rows(arrays, plan, rows, parts)
    arrays["aux_rows"][:] = np.arange(first_aux_row, first_aux_row + len(arrays["aux_rows"]))
    arrays["kept_rows"][:num_kept] = draws.rows
    if num_kept < len(arrays["kept_rows"]):
        arrays["kept_rows"][num_kept:] = 0
    arrays["num_given"][:num_seqs] = plan.num_given
    arrays["num_draft_tokens"][:num_seqs] = draws.counts - 1
    arrays["stamp"][0] = stamp_of(plan.draft_step)
    pad_forward(arrays, len(rows.sequence), num_seqs, len(parts.ends), padding_row)


def pad_draws(arrays: HostArrays, num_rows: int, num_seqs: int, padding_row: int) -> None:
    """Everything from drawn row `num_rows` and sequence `num_seqs` on. padding_row: of the token table."""
    if num_rows < len(arrays["sequence"]):
        for name in ("token_index", "window_len"):
            arrays[name][num_rows:] = 0
        # Non-decreasing, as the draw wants it.
        arrays["sequence"][num_rows:] = len(arrays["first_row"]) - 1
    if num_seqs < len(arrays["first_row"]):
        # A row that there is, whatever it drew.
        arrays["first_row"][num_seqs:] = len(arrays["sequence"]) - 1
        arrays["num_draft_tokens"][num_seqs:] = 0
        arrays["table_rows"][num_seqs:] = padding_row
        pad_sampling(arrays, num_seqs)


def fill_draws(arrays: HostArrays, plan: TargetPlan, draws: Draws, padding_row: int) -> None:
    """Write what a checked plan draws. padding_row: of the token table."""
    num_rows, num_seqs = len(draws.rows), len(draws.counts)
    arrays["sequence"][:num_rows] = draws.sequence
    arrays["token_index"][:num_rows] = draws.token_index
    arrays["window_len"][:num_rows] = draws.place
    arrays["first_row"][:num_seqs] = draws.first
    arrays["num_draft_tokens"][:num_seqs] = draws.counts - 1
    arrays["table_rows"][:num_seqs] = plan.table_rows
    pad_draws(arrays, num_rows, num_seqs, padding_row)
    if draws.are_wanted is None:
        fill_sampling(arrays, plan.sampling, num_seqs)
    else:
        pad_sampling(arrays, 0)
        fill_sampling(arrays, plan.sampling, np.flatnonzero(draws.are_wanted))


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
