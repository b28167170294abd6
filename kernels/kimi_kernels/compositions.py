"""Ops that a kernel set may fuse, composed of its other ops: what a set does that has nothing better, bit for bit."""

import torch
from torch import Tensor

from kimi_kernels import signatures as op
from kimi_kernels.weights import PackedWeight


def composed_logits(linear: op.Linear) -> op.Logits:
    """`signatures.Logits` of a set whose `pack_linear` keeps every weight in float32."""

    def logits(x: Tensor, weight: PackedWeight) -> Tensor:
        return linear(x.float(), weight)

    return logits


def composed_mla_query(per_head_linear: op.PerHeadLinear, rope: op.Rope) -> op.MlaQuery:
    """`signatures.MlaQuery`."""

    def mla_query(q: Tensor, w_uk: Tensor, cos_sin: Tensor, positions: Tensor, interleaved: bool) -> Tensor:
        q_nope, q_pe = torch.split(q, [w_uk.shape[1], q.shape[2] - w_uk.shape[1]], dim=2)
        return torch.cat([per_head_linear(q_nope, w_uk), rope(q_pe, cos_sin, positions, interleaved)], dim=2)

    return mla_query
