"""Products of routed experts that a token gets, before they are summed: whoever reads it next may sum it in passing."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kimi_kernels.argument_checks import require_dtype, require_shape


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceProducts:
    """Each choice's product, which stands for the weighted sum of a token's: [T, H] of the products' dtype.

    T tokens, K experts a token, H hidden.
    """

    products: Tensor
    """[T * K, H]; rows of experts held elsewhere, and of padding, hold anything."""
    topk_ids: Tensor
    """[T, K] int32, global ids."""
    topk_weights: Tensor
    """[T, K] float32."""
    first_expert: int
    """Global id of the first expert held here."""
    num_experts: int
    """Experts held here; choices of others add nothing."""

    @property
    def shape(self) -> torch.Size:
        """The shape of the sum."""
        return torch.Size((self.topk_ids.shape[0], self.products.shape[1]))

    @property
    def dtype(self) -> torch.dtype:
        return self.products.dtype


Terms = Tensor | ChoiceProducts
"""[T, H], or what sums to it."""


def plain_sum(terms: Terms, second: Tensor | None = None) -> Tensor:
    """`signatures.SumTerms` in plain torch: products are added in float32 in the order of the choices, each sum is
    rounded to the dtype.

    Raises:
        ValueError: `second` is not of the sum's shape and dtype.
    """
    if isinstance(terms, ChoiceProducts):
        local = terms.topk_ids - terms.first_expert
        is_held = ((local >= 0) & (local < terms.num_experts)).unsqueeze(2)
        products = terms.products.view(*terms.topk_ids.shape, -1).float()
        total = torch.zeros(terms.shape, dtype=torch.float32, device=products.device)
        for choice in range(products.shape[1]):
            weighted = terms.topk_weights[:, choice, None] * products[:, choice]
            total += torch.where(is_held[:, choice], weighted, 0.0)
        terms = total.to(terms.dtype)
    if second is None:
        return terms
    require_shape("second", second, *terms.shape)
    require_dtype("second", second, terms.dtype)
    return terms + second
