"""The latent query as its words say: a head's first part times its matrix, its second part turned."""

import torch
from torch import Tensor

from kimi_kernels.rope.naive import rope


def mla_query(q: Tensor, w_uk: Tensor, cos_sin: Tensor, positions: Tensor, interleaved: bool) -> Tensor:
    nope_dim = w_uk.shape[1]
    in_latent_space = torch.einsum("tnp,npl->tnl", q[..., :nope_dim].double(), w_uk.double())
    return torch.cat([in_latent_space, rope(q[..., nope_dim:], cos_sin, positions, interleaved)], dim=2)
