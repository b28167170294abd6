"""A token's logits and aux states have the same bits with row-invariant kernels, however its sequence was cut into
steps and whatever ran beside it."""

import dataclasses

import pytest
import torch

from kimi_backend.models.kimi_k25 import KimiTarget
from kimi_kernels.kernel_set import KernelSet
from support.target_steps import TargetSteps, build_target
from support.tiny_checkpoints import random_target
from support.tiny_configs import target_config

NUM_LAYERS = 3
AUX_LAYER_IDS = (0, 1, 2, 3)
NUM_TOKENS = 150
CONTEXT = 262144
KERNELS = KernelSet.plain()


@pytest.fixture(scope="module")
def target() -> KimiTarget:
    config = target_config(num_hidden_layers=NUM_LAYERS, n_group=2, topk_group=1)
    return build_target(config, random_target(config), KERNELS)


@pytest.fixture(scope="module")
def tokens() -> list[int]:
    return torch.randint(0, 96, (NUM_TOKENS,), generator=torch.Generator().manual_seed(0)).tolist()


@pytest.fixture(scope="module")
def whole(target: KimiTarget, tokens: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits and aux states of the sequence in one step."""
    logits, aux = TargetSteps(target, KERNELS, [NUM_TOKENS], aux_layer_ids=AUX_LAYER_IDS).run(tokens, [NUM_TOKENS])
    assert logits.isfinite().all()
    return logits, aux


def splits_of(size: int) -> list[int]:
    full, rest = divmod(NUM_TOKENS, size)
    return [size] * full + [rest] * (rest > 0)


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8, 9, 64])
def test_any_chunk_size_gives_the_same_bits(
    target: KimiTarget, tokens: list[int], whole: tuple[torch.Tensor, torch.Tensor], size: int
) -> None:
    steps = TargetSteps(target, KERNELS, [NUM_TOKENS], aux_layer_ids=AUX_LAYER_IDS, block_size=64, seed=size)
    logits, aux = steps.run(tokens, splits_of(size))
    assert torch.equal(logits, whole[0])
    assert torch.equal(aux, whole[1])


def test_prefill_chunks_then_verify_rows_of_every_length(
    target: KimiTarget, tokens: list[int], whole: tuple[torch.Tensor, torch.Tensor]
) -> None:
    splits = [64, 9, 3, 1, 2, 3, 4, 5, 6, 7, 8, 8, 7]
    splits.append(NUM_TOKENS - sum(splits))
    logits, aux = TargetSteps(target, KERNELS, [NUM_TOKENS], aux_layer_ids=AUX_LAYER_IDS).run(tokens, splits)
    assert torch.equal(logits, whole[0])
    assert torch.equal(aux, whole[1])


def test_rejected_rows_leave_no_trace(
    target: KimiTarget, tokens: list[int], whole: tuple[torch.Tensor, torch.Tensor]
) -> None:
    steps = TargetSteps(target, KERNELS, [NUM_TOKENS + 8], aux_layer_ids=AUX_LAYER_IDS)
    steps.step([(0, tokens[:70])])
    steps.step([(0, [tokens[70], tokens[71], 5, 6, 7])])
    steps.sequences.lengths[0] -= 3
    logits, aux = steps.step([(0, tokens[72:])])
    assert torch.equal(logits[0], whole[0][72:])
    assert torch.equal(aux[0], whole[1][72:])


@pytest.mark.parametrize("absorbs", [True, False], ids=["absorbed", "prefill apart"])
def test_a_ragged_batch_gives_each_sequence_what_it_gets_alone(
    target: KimiTarget, tokens: list[int], whole: tuple[torch.Tensor, torch.Tensor], absorbs: bool
) -> None:
    """This is also the way a kernel set with a prefill kernel of its own takes: rows in `prefill` from the first long
    chunk on.

    Verify rows, a long chunk and a short tail ride together; block order and batch order are shuffled."""
    kernels = dataclasses.replace(KERNELS, absorb_prefill=absorbs)
    others = [tokens[::-1], tokens[7:] + tokens[:7], tokens[40:] + tokens[:40]]
    capacities = [NUM_TOKENS] * 4
    steps = TargetSteps(target, kernels, capacities, aux_layer_ids=AUX_LAYER_IDS, block_size=16, seed=11)
    steps.step([(1, others[0][:33]), (0, tokens[:100]), (2, others[1][:5])])
    steps.step([(2, others[1][5:13]), (0, tokens[100:103]), (3, others[2][:64]), (1, others[0][33:35])])
    logits, aux = steps.step([(0, tokens[103:111]), (1, others[0][35:40]), (3, others[2][64:]), (2, others[1][13:14])])
    tail_logits, _ = steps.step([(0, tokens[111:])])
    assert torch.equal(torch.cat([logits[0], tail_logits[0]]), whole[0][103:])
    assert torch.equal(aux[0], whole[1][103:111])


def test_a_context_of_262144_tokens() -> None:
    """The last rows see all of the cache, and the same bits, one by one, in a verify, or in a chunk."""
    config = target_config(
        num_hidden_layers=2,
        hidden_size=32,
        num_attention_heads=1,
        kv_lora_rank=16,
        intermediate_size=32,
        first_k_dense_replace=2,
        max_position_embeddings=CONTEXT,
    )
    target = build_target(config, random_target(config), KERNELS)
    tokens = torch.randint(0, 96, (16,), generator=torch.Generator().manual_seed(1)).tolist()
    latents = torch.randn(2, CONTEXT + 1024, 32, generator=torch.Generator().manual_seed(2))
    results = []
    for splits in ([16], [9, 1, 1, 5], [16]):
        steps = TargetSteps(target, KERNELS, [CONTEXT], aux_layer_ids=(1, 2), block_size=64, seed=3)
        steps.cache.view(-1).copy_(latents.view(-1)[: steps.cache.numel()])
        steps.sequences.lengths[0] = CONTEXT - 16
        if len(results) == 2:
            steps.cache[:, steps.sequences.block_table[0, 0], 0] += 100.0
        results.append(steps.run(tokens, splits))
    logits, aux = results[0]
    assert logits.isfinite().all()
    assert torch.equal(results[1][0], logits)
    assert torch.equal(results[1][1], aux)
    assert not torch.equal(results[2][0], logits), "the last rows do not see the first token"
