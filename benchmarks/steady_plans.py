"""A steady step's two plans, as recorded from nothing: B sequences of CONTEXT tokens, k + 1 rows each."""

import numpy as np

from kimi_backend.types.plan import AuxHandle, DraftPlan, RowPlan, SamplingPlan, TargetPlan

BLOCK_SIZE = 64
CONTEXT = 128


def steady_plans(count: int, k: int, region: int | None = None) -> tuple[TargetPlan, DraftPlan]:
    """A verify of `count` sequences of CONTEXT tokens and the draft step after it, with half of the drafts accepted.

    Args:
        region: of the shared aux buffer that the draft reads; None: a tensor comes along.
    """
    blocks = -(-(CONTEXT + 2 * k + 2) // BLOCK_SIZE)
    table = np.arange(count * blocks, dtype=np.int32).reshape(count, blocks)
    accepted = k // 2
    target = TargetPlan.given(
        step_id=0,
        rows=RowPlan(
            token_ids=np.ones(count * (k + 1), np.int32),
            query_lens=np.full(count, k + 1, np.int32),
            seq_lens=np.full(count, CONTEXT + k + 1, np.int32),
            block_table=table,
        ),
        num_sampled_rows=np.full(count, k + 1, np.int32),
        sampling=SamplingPlan.plain(count, temperature=1.0, seed=np.arange(count, dtype=np.int64)),
        num_logprobs=None,
        wants_aux=np.ones(count, np.bool_),
    )
    rows = accepted + 1
    first = np.arange(count)[:, None] * (k + 1)
    draft = DraftPlan.given(
        step_id=0,
        rows=RowPlan(
            token_ids=np.ones(count * rows, np.int32),
            query_lens=np.full(count, rows, np.int32),
            seq_lens=np.full(count, CONTEXT + rows, np.int32),
            block_table=table,
        ),
        aux=AuxHandle(region=region),
        aux_rows=(first + np.arange(rows)).reshape(-1).astype(np.int64),
        num_proposals=np.full(count, k, np.int32),
        sampling=SamplingPlan.plain(count, temperature=1.0, seed=np.arange(count, dtype=np.int64)),
        output_index=np.full(count, CONTEXT + rows + 1, np.int64),
    )
    return target, draft
