"""A target step and a draft step, metadata and decode plan included, can be captured in a CUDA graph and replayed over
other tokens, lengths and blocks."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from kimi_backend.config.draft_config import DraftOverrides
from kimi_backend.runners.metadata_builder import MetadataBuilder
from kimi_kernels.attention_batch import AttentionMetadata
from kimi_kernels.kernel_set import KernelSet
from support.device_kernels import device_kernel_set
from support.draft_steps import build_draft
from support.target_steps import build_target
from support.tiny_checkpoints import random_draft, random_target
from support.tiny_configs import HOPPER_WIDTHS, draft_config, target_config

pytestmark = pytest.mark.gpu

AUX_LAYER_IDS = (1, 2, 3)
NUM_SEQS, QUERY_LEN, NUM_BLOCKS, BLOCK_SIZE, MAX_LEN = 5, 4, 64, 64, 512


def kernel_set() -> KernelSet:
    """Triton-language attention, norms and rope; plain matrix products, router, experts and argmax."""
    triton, plain = KernelSet.triton(), device_kernel_set()
    names = (
        "pack_linear",
        "linear",
        "per_head_linear",
        "logits",
        "silu_down",
        "route_experts",
        "route_silu_down",
        "pack_experts",
        "moe_experts",
    )
    return replace(triton, **{name: getattr(plain, name) for name in names})


class StaticStep:
    """Inputs of a step in tensors that keep their place."""

    def __init__(self, kernels: KernelSet, num_mla_heads: int | None) -> None:
        device = torch.device("cuda")
        self.builder = MetadataBuilder(kernels=kernels, block_size=BLOCK_SIZE, num_mla_heads=num_mla_heads)
        self.host_query_lens = np.full(NUM_SEQS, QUERY_LEN, np.int32)
        self.host_seq_lens = np.full(NUM_SEQS, MAX_LEN, np.int32)
        self.query_lens = torch.full((NUM_SEQS,), QUERY_LEN, dtype=torch.int32, device=device)
        self.seq_lens = torch.full((NUM_SEQS,), QUERY_LEN, dtype=torch.int32, device=device)
        self.block_table = torch.zeros((NUM_SEQS, MAX_LEN // BLOCK_SIZE), dtype=torch.int32, device=device)
        self.token_ids = torch.zeros(NUM_SEQS * QUERY_LEN, dtype=torch.int32, device=device)
        self.aux = torch.zeros((NUM_SEQS * QUERY_LEN, 3 * 256), dtype=torch.bfloat16, device=device)

    def fill(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.seq_lens.copy_(torch.randint(QUERY_LEN, MAX_LEN + 1, (NUM_SEQS,), generator=generator))
        blocks = torch.randperm(NUM_BLOCKS, generator=generator)[: self.block_table.numel()]
        self.block_table.copy_(blocks.view(self.block_table.shape))
        self.token_ids.copy_(torch.randint(0, 96, self.token_ids.shape, generator=generator))
        self.aux.copy_(torch.randn(self.aux.shape, generator=generator))

    def metadata(self) -> AttentionMetadata:
        return self.builder.build(
            self.query_lens, self.seq_lens, self.block_table, self.host_query_lens, self.host_seq_lens
        )


def assert_replays_equal_eager_runs(step: StaticStep, pool: torch.Tensor, run: Callable[[], torch.Tensor]) -> None:
    """run: () -> tensor. Eager runs come first, then one graph over the same inputs; each from the same pool."""
    generator = torch.Generator(pool.device).manual_seed(0)
    start = torch.randn(pool.shape, generator=generator, device=pool.device).to(pool.dtype)
    expected = []
    for seed in range(4):
        pool.copy_(start)
        step.fill(seed)
        expected.append(run().clone())
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = run()
    for seed in (2, 0, 3, 1):
        pool.copy_(start)
        step.fill(seed)
        graph.replay()
        assert output.isfinite().all()
        assert torch.equal(output, expected[seed]), f"inputs {seed}"
    assert not torch.equal(expected[0], expected[1])


@torch.inference_mode()
def test_a_target_step() -> None:
    config, kernels, device = target_config(**HOPPER_WIDTHS, num_hidden_layers=3), kernel_set(), torch.device("cuda")
    target = build_target(config, random_target(config), kernels, device, torch.bfloat16)
    pool = torch.empty(target.kv_pool_shape(NUM_BLOCKS, BLOCK_SIZE), dtype=torch.bfloat16, device=device)
    step = StaticStep(kernels, target.num_heads)

    def run() -> torch.Tensor:
        hidden, aux = target.forward(step.token_ids, step.metadata(), pool, aux_layer_ids=AUX_LAYER_IDS)
        assert aux is not None
        return torch.cat([target.compute_logits(hidden), aux.float()], dim=1)

    assert_replays_equal_eager_runs(step, pool, run)


@pytest.mark.parametrize("kind", ["mla31", "mha"])
@torch.inference_mode()
def test_a_draft_step(kind: str) -> None:
    target, kernels, device = target_config(**HOPPER_WIDTHS, num_hidden_layers=3), kernel_set(), torch.device("cuda")
    fields = HOPPER_WIDTHS if kind != "mha" else {"hidden_size": 256, "num_key_value_heads": 4, "head_dim": 128}
    config = draft_config(kind, target, DraftOverrides(aux_layer_ids=AUX_LAYER_IDS), **fields)
    draft = build_draft(config, random_draft(config), kernels, device, torch.bfloat16)
    pool = torch.empty(draft.kv_pool_shape(NUM_BLOCKS, BLOCK_SIZE), dtype=torch.bfloat16, device=device)
    step = StaticStep(kernels, draft.num_mla_heads)

    def run() -> torch.Tensor:
        hidden = draft.combine_aux(step.aux)
        normed, feedback = draft.forward(step.token_ids, hidden, step.metadata(), pool)
        return torch.cat([draft.compute_logits(normed), feedback.float()], dim=1)

    assert_replays_equal_eager_runs(step, pool, run)
