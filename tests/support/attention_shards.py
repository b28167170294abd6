"""A paged batch whose keys are dealt out over shards, as ranks would hold them, and the sum of what shards attend."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from support.attention_cases import PagedCase, paged_case

ANY_COUNT = 2_147_480_000
"""Keys of rows that no sequence owns: nothing reads them."""


@dataclass(frozen=True)
class Shard:
    """The keys of a batch that one of several ranks holds."""

    case: PagedCase
    contents: list[Tensor]
    row_keys: Tensor
    """[num_tokens] int32: of each row's keys, how many lie here."""


def shards_of(case: PagedCase, contents: Sequence[Tensor], num_shards: int, run: int) -> list[Shard]:
    """Deal the keys of each sequence out in turns, `run` of them at a time; queries and padding stay as they are."""
    starts = case.batch.cu_seqlens_q.tolist()
    query_lens = [end - start for start, end in pairwise(starts)]
    owners = [torch.arange(len(content)) // run % num_shards for content in contents]
    shards = []
    for shard in range(num_shards):
        own = [content[owner == shard] for content, owner in zip(contents, owners, strict=True)]
        local = paged_case(query_lens, [len(keys) for keys in own], case.block_size, seed=shard)
        row_keys = torch.full((case.batch.num_tokens,), ANY_COUNT, dtype=torch.int32)
        for row, sequence, num_keys in case.rows():
            row_keys[row] = (owners[sequence][:num_keys] == shard).sum()
        batch = replace(local.batch, num_tokens=case.batch.num_tokens, max_seq_len=case.batch.max_seq_len)
        shards.append(Shard(replace(local, batch=batch), own, row_keys))
    return shards


def merge_shards(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """(out, lse) over all keys from those over each shard's, in float64."""
    lse = torch.stack(list(lses)).double()
    whole = lse.logsumexp(0)
    weights = (lse - whole).exp().where(whole.isfinite(), 0.0)
    return (torch.stack(list(outs)).double() * weights[..., None]).sum(0), whole
