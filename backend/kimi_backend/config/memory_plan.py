"""A GPU's memory, divided between weights and the two KV pools: a pure function, so that the target's and the
draft's runner come to the same numbers without looking at what the other has allocated."""

from dataclasses import dataclass, replace

from kimi_backend.config.draft_config import Eagle3MhaDraftConfig, Eagle3MlaDraftConfig
from kimi_backend.config.linear_format import LinearFormat
from kimi_backend.config.mla_dims import kv_item_bytes
from kimi_backend.config.model_config import KimiModelConfig
from kimi_backend.config.step_memory import StepSizes, draft_step_bytes, target_step_bytes
from kimi_backend.config.weight_sizes import WeightFormat, draft_weight_bytes, target_weight_bytes
from kimi_backend.errors import ConfigError

GIB = 1 << 30
RANKS_BYTES = 5 * GIB // 4
"""NCCL's buffers and the receive buffers of `kimi_kernels.collectives`, with more than one rank, of each GPU by each
process. They took 1,124 MiB of an H200 with two ranks (`benchmarks/collectives.py`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySettings:
    """The values that the plan depends on besides the two models."""

    gpu_bytes: int
    """Memory of one GPU that the plan may use."""
    tp_size: int = 1
    block_size: int = 64
    kv_cache_dtype: str = "bfloat16"
    weight_dtype: str = "bfloat16"
    """Compute dtype of linear layers; torch's name."""
    draft_format: LinearFormat = LinearFormat.NONE
    """The format of the draft's linear layers; without effect where `widens_matrices`."""
    draft_head_format: LinearFormat | None = None
    """The format of its head; None takes `draft_format`."""
    widens_matrices: bool = False
    """The plain kernels, which hold matrices of linear layers and experts in float32."""
    max_model_len: int = 0
    """0 takes the target's max_position_embeddings."""
    max_num_batched_tokens: int = 2048
    max_num_sampled_rows: int = 512
    """Rows of logits in a step: sequences * (draft tokens + 1)."""
    max_num_seqs: int = 64
    """Sequences in a step."""
    captures_steps: bool = True
    """Steps of few rows are CUDA graphs."""
    overhead_bytes: int = 3 * GIB
    """CUDA contexts, the nodes of graphs, workspaces of attention and libraries, fragmentation: both processes'."""
    ranks_bytes: int = RANKS_BYTES
    """Counted where tp_size is above 1, for each of the two models: they may be two processes."""
    num_target_blocks: int | None = None
    """None: as many as fit."""
    num_draft_blocks: int | None = None
    """None: as many as the target has."""
    draft_has_embed: bool = True
    draft_has_head: bool = True
    """False where the draft uses the target's matrix in place, in the same process."""

    def __post_init__(self) -> None:
        for field in (
            "gpu_bytes",
            "tp_size",
            "block_size",
            "max_num_batched_tokens",
            "max_num_sampled_rows",
            "max_num_seqs",
        ):
            _check_integer(field, getattr(self, field), 1)
        for field in ("max_model_len", "overhead_bytes", "ranks_bytes"):
            _check_integer(field, getattr(self, field), 0)
        for field in ("num_target_blocks", "num_draft_blocks"):
            if getattr(self, field) is not None:
                _check_integer(field, getattr(self, field), 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Bytes of one GPU (of each of `tp_size`)."""

    target_weight_bytes: int
    draft_weight_bytes: int
    activation_bytes: int
    """Estimate of what a step allocates beside weights and KV, with `overhead_bytes`."""
    target_kv_bytes_per_token: int
    draft_kv_bytes_per_token: int
    block_size: int
    num_target_blocks: int
    num_draft_blocks: int
    """0 without a draft."""
    max_model_len: int

    @property
    def target_kv_bytes(self) -> int:
        return self.num_target_blocks * self.block_size * self.target_kv_bytes_per_token

    @property
    def draft_kv_bytes(self) -> int:
        return self.num_draft_blocks * self.block_size * self.draft_kv_bytes_per_token

    @property
    def total_bytes(self) -> int:
        weights = self.target_weight_bytes + self.draft_weight_bytes
        return weights + self.activation_bytes + self.target_kv_bytes + self.draft_kv_bytes

    @property
    def num_kv_tokens(self) -> int:
        """Tokens that both pools hold."""
        num_blocks = self.num_target_blocks
        if self.draft_kv_bytes_per_token:
            num_blocks = min(num_blocks, self.num_draft_blocks)
        return num_blocks * self.block_size


def plan_memory(
    target: KimiModelConfig, draft: Eagle3MlaDraftConfig | Eagle3MhaDraftConfig | None, settings: MemorySettings
) -> MemoryPlan:
    """Divide a GPU between the models; both are on it, with the same tensor-parallel size.

    Raises:
        ConfigError: the models do not divide among the ranks, the weights do not fit, or one sequence of max_model_len
            does not fit both pools.
    """
    _check_divisible(target, draft, settings)
    longest = target.max_position_embeddings
    max_model_len = settings.max_model_len or longest
    if max_model_len > longest:
        raise ConfigError(
            f"max_model_len is {max_model_len}, expected at most {longest}, the target's max_position_embeddings"
        )
    weights = WeightFormat(
        tp_size=settings.tp_size,
        item_bytes=kv_item_bytes(settings.weight_dtype),
        widens_matrices=settings.widens_matrices,
        draft_format=settings.draft_format,
        draft_head_format=settings.draft_head_format,
    )
    target_bytes = target_weight_bytes(target, weights)
    draft_bytes = draft_kv = 0
    if draft is not None:
        has_embed, has_head = settings.draft_has_embed, settings.draft_has_head
        draft_bytes = draft_weight_bytes(draft, weights, has_embed=has_embed, has_head=has_head)
        draft_kv = draft.kv_bytes_per_token(settings.kv_cache_dtype, settings.tp_size)
    activations = settings.overhead_bytes + _activation_bytes(target, draft, weights, settings)
    num_processes = 1 if draft is None else 2
    activations += num_processes * settings.ranks_bytes if settings.tp_size > 1 else 0
    plan = MemoryPlan(
        target_weight_bytes=target_bytes,
        draft_weight_bytes=draft_bytes,
        activation_bytes=activations,
        target_kv_bytes_per_token=target.kv_bytes_per_token(settings.kv_cache_dtype),
        draft_kv_bytes_per_token=draft_kv,
        block_size=settings.block_size,
        num_target_blocks=0,
        num_draft_blocks=0,
        max_model_len=max_model_len,
    )
    return _with_blocks(plan, settings)


def _with_blocks(plan: MemoryPlan, settings: MemorySettings) -> MemoryPlan:
    """Fill the pools with what the weights leave."""
    left = settings.gpu_bytes - plan.total_bytes
    if left <= 0:
        smaller = ", or kernels 'triton': 'plain' holds matrices in float32" if settings.widens_matrices else ""
        raise ConfigError(
            f"the weights do not fit: {_gib(plan.total_bytes)} of weights and workspace a GPU,"
            f" expected less than {_gib(settings.gpu_bytes)}; use more GPUs (tp_size is {settings.tp_size}){smaller}"
        )
    target_block = plan.block_size * plan.target_kv_bytes_per_token
    draft_block = plan.block_size * plan.draft_kv_bytes_per_token
    num_draft = settings.num_draft_blocks if draft_block else 0
    if settings.num_target_blocks is not None:
        num_target = settings.num_target_blocks
    elif num_draft is None:
        num_target = left // (target_block + draft_block)
    else:
        num_target = max(0, left - num_draft * draft_block) // target_block
    num_draft = num_target if num_draft is None else num_draft
    needed = -(-plan.max_model_len // plan.block_size)
    for name, found, is_used in (("target", num_target, True), ("draft", num_draft, draft_block > 0)):
        if is_used and found < needed:
            raise ConfigError(
                f"one sequence of max_model_len {plan.max_model_len} needs {needed} blocks in the {name}'s KV pool,"
                f" found room for {found}; lower max_model_len to {found * plan.block_size} or use more memory"
            )
    asked = num_target * target_block + num_draft * draft_block
    if asked > left:
        raise ConfigError(
            f"num_target_blocks {num_target} and num_draft_blocks {num_draft} take {_gib(asked)} of KV,"
            f" expected at most {_gib(left)}"
        )
    return replace(plan, num_target_blocks=num_target, num_draft_blocks=num_draft)


def _activation_bytes(
    target: KimiModelConfig,
    draft: Eagle3MlaDraftConfig | Eagle3MhaDraftConfig | None,
    weights: WeightFormat,
    settings: MemorySettings,
) -> int:
    sizes = StepSizes(
        max_num_batched_tokens=settings.max_num_batched_tokens,
        max_num_sampled_rows=settings.max_num_sampled_rows,
        max_num_seqs=settings.max_num_seqs,
        captures=settings.captures_steps,
    )
    num_aux = draft.num_aux_hidden_states if draft is not None else 0
    drafting = draft_step_bytes(draft, weights, sizes) if draft is not None else 0
    return target_step_bytes(target, num_aux, weights, sizes) + drafting


def _check_divisible(
    target: KimiModelConfig, draft: Eagle3MlaDraftConfig | Eagle3MhaDraftConfig | None, settings: MemorySettings
) -> None:
    """Every rank holds an equal slice; a group or block of an expert is never cut."""
    stored = target.expert_format
    unit = stored.group_size or stored.block_size or 1
    divided = [
        ("num_attention_heads", target.num_attention_heads, 1),
        ("intermediate_size", target.intermediate_size, 1),
        ("moe_intermediate_size", target.moe_intermediate_size, unit),
        ("vocab_size", target.vocab_size, 1),
    ]
    if draft is not None:
        divided += [
            ("draft num_attention_heads", draft.num_attention_heads, 1),
            ("draft intermediate_size", draft.intermediate_size, 1),
            ("draft draft_vocab_size", draft.draft_vocab_size, 1),
            ("draft hidden_size", draft.hidden_size, 1),
        ]
        if isinstance(draft, Eagle3MhaDraftConfig):
            divided.append(("draft num_key_value_heads", draft.num_key_value_heads, 1))
    for field, value, multiple in divided:
        part, rest = divmod(value, settings.tp_size)
        if rest or (settings.tp_size > 1 and part % multiple):
            of = f" in multiples of {multiple}" if multiple > 1 else ""
            raise ConfigError(f"tp_size is {settings.tp_size}, expected a divisor of {field} ({value}){of}")


def _check_integer(field: str, value: object, minimum: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
        raise ConfigError(f"{field} is {value!r}, expected an integer of at least {minimum}")


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f} GiB"
