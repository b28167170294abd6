"""The check that the ranks can divide the models evenly, made before a weight is read."""

import math
from collections.abc import Iterator

from kimi_backend.config.draft_config import Eagle3DraftConfig, Eagle3MhaDraftConfig
from kimi_backend.config.model_config import KimiModelConfig
from kimi_backend.errors import ConfigError


def check_divides(size: int, target: KimiModelConfig, draft: Eagle3DraftConfig | None) -> None:
    """Pass silently if `size` ranks divide every dimension that is divided.

    Raises:
        ConfigError: lists those that do not, and the sizes that do.
    """
    dimensions = list(_dimensions(target, draft))
    wrong = [f"{name} {value}" for name, value in dimensions if value % size]
    if wrong:
        common = math.gcd(*(value for _, value in dimensions))
        allowed = [n for n in range(1, common + 1) if common % n == 0]
        raise ConfigError(
            f"setting tensor_parallel_size: {size} given, which does not divide {', '.join(wrong)};"
            f" {', '.join(map(str, allowed))} would"
        )


def _dimensions(target: KimiModelConfig, draft: Eagle3DraftConfig | None) -> Iterator[tuple[str, int]]:
    yield "num_attention_heads", target.num_attention_heads
    yield "vocab_size", target.vocab_size
    if target.n_routed_experts:
        yield "moe_intermediate_size", target.moe_intermediate_size
    yield "intermediate_size", target.intermediate_size
    if draft is None:
        return
    yield "the draft's num_attention_heads", draft.num_attention_heads
    yield "the draft's intermediate_size", draft.intermediate_size
    yield "the draft's hidden_size", draft.hidden_size
    yield "the draft's draft_vocab_size", draft.draft_vocab_size
    if isinstance(draft, Eagle3MhaDraftConfig):
        yield "the draft's num_key_value_heads", draft.num_key_value_heads
