"""The router as its words say, a row at a time."""

from collections.abc import Iterable

import torch
from torch import Tensor


def route_experts(
    router_logits: Tensor,
    correction_bias: Tensor,
    *,
    top_k: int,
    num_groups: int,
    topk_groups: int,
    renormalize: bool,
    scaling_factor: float,
    slot_mapping: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    scores = router_logits.double().sigmoid().float()
    size = router_logits.shape[1] // num_groups
    all_ids, all_weights = [], []
    for row, biased in enumerate((scores + correction_bias).tolist()):
        group_scores = [sum(sorted(biased[first : first + size])[-2:]) for first in range(0, len(biased), size)]
        open_groups = _best(group_scores, range(num_groups), topk_groups)
        chosen = _best(biased, [expert for expert in range(len(biased)) if expert // size in open_groups], top_k)
        weights = scores[row, chosen].double()
        all_weights.append(scaling_factor * (weights / (weights.sum() + 1e-20) if renormalize else weights))
        is_padding = slot_mapping is not None and slot_mapping[row] < 0
        all_ids.append([-1] * top_k if is_padding else chosen)
    ids = torch.tensor(all_ids, dtype=torch.int32).view(-1, top_k)
    return ids, torch.stack(all_weights) if all_weights else torch.empty(0, top_k)


def _best(scores: list[float], candidates: Iterable[int], number: int) -> list[int]:
    """The candidates with the largest scores, the first of equals first."""
    return sorted(candidates, key=lambda candidate: -scores[candidate])[:number]
