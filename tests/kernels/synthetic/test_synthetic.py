"""Uniform routing and synthetic acceptance: what they promise, and the kernels against plain torch."""

from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch

from kimi_kernels import KernelSet
from kimi_kernels.sampling_inputs import PLACEHOLDER_TOKEN_ID, SamplingInputs, SamplingRows
from kimi_kernels.synthetic import plain
from kimi_kernels.synthetic_sets import acceptance_chance, chances_of, with_synthetic_acceptance, with_uniform_routing
from support.interpreted import INTERPRETED
from support.sampling_cases import SequenceCase, sampling_tensors

ROUTER: dict[str, Any] = {
    "top_k": 8,
    "num_groups": 1,
    "topk_groups": 1,
    "renormalize": True,
    "scaling_factor": 2.827,
}
CPU = torch.device("cpu")


@pytest.fixture(params=["plain", pytest.param("kernel", marks=INTERPRETED)])
def ops(request: pytest.FixtureRequest) -> Iterator[ModuleType]:
    import importlib

    yield importlib.import_module(f"kimi_kernels.synthetic.{request.param}")


def route(ops: ModuleType, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    ids, weights = ops.route_uniform(logits, torch.zeros(logits.shape[1]), **ROUTER)
    return ids, weights


@pytest.mark.parametrize(("num_tokens", "num_experts"), [(1, 384), (33, 384), (5, 30)])
def test_the_kernel_routes_as_plain_torch(ops: ModuleType, num_tokens: int, num_experts: int) -> None:
    torch.manual_seed(num_tokens)
    logits = torch.randn(num_tokens, num_experts + 3)[:, :num_experts]
    ids, weights = route(ops, logits)
    expected_ids, expected = route(plain, logits)
    assert torch.equal(ids, expected_ids)
    torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(weights.sum(1), torch.full((num_tokens,), 2.827))


def test_routing_is_uniform_whatever_the_logits_prefer() -> None:
    torch.manual_seed(0)
    logits = torch.randn(6000, 48) + torch.arange(48)  # the true router would take the last eight only
    ids, _ = route(plain, logits)
    assert all(len(set(row)) == 8 for row in ids.tolist())
    counts = torch.bincount(ids.flatten().long(), minlength=48).double()
    expected = 6000 * 8 / 48
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    assert chi_square < 95, counts  # 47 degrees of freedom: p = 4e-5
    pairs = torch.zeros(48, 48)
    for row in ids[:3000].tolist():
        pairs[row[0], row[1]] += 1
    assert pairs.max() < 12, "the second expert depends on the first"


def test_routing_repeats_for_the_same_logits_and_changes_with_their_last_bit() -> None:
    torch.manual_seed(0)
    logits = torch.randn(200, 384)
    nudged = torch.nextafter(logits, torch.full_like(logits, 9.0))
    assert torch.equal(route(plain, logits)[0], route(plain, logits.clone())[0])
    shared = (route(plain, logits)[0][:, :, None] == route(plain, nudged)[0][:, None, :]).any(2)
    assert float(shared.float().mean()) < 0.05, "8 of 384 agree by chance at 2 %"


def rows_of(windows: list[list[int]], seeds: list[int], lengths: list[int]) -> tuple[SamplingInputs, SamplingRows]:
    """Each sequence samples after every number of its window's tokens; placeholders stand behind a window."""
    inputs, rows = sampling_tensors(
        [
            SequenceCase(seed=seed, prompt=[0] * length, window=window, rows=list(range(len(window) + 1)))
            for window, seed, length in zip(windows, seeds, lengths, strict=True)
        ]
    )
    is_draft = torch.arange(rows.window_token_ids.shape[1]) < torch.tensor([len(window) for window in windows])[:, None]
    window_token_ids = rows.window_token_ids.masked_fill(~is_draft, PLACEHOLDER_TOKEN_ID)
    return inputs, replace(rows, window_token_ids=window_token_ids)


def test_the_kernel_forces_as_plain_torch(ops: ModuleType) -> None:
    torch.manual_seed(0)
    windows = [torch.randint(0, 50, (int(n),)).tolist() for n in torch.randint(0, 6, (60,))]
    seeds = [int(s) for s in torch.randint(0, 2**62, (60,))]
    inputs, rows = rows_of(windows, [*seeds[:-1], 2**64 - 5], list(range(1, 61)))
    tokens = torch.randint(0, 50, (len(rows.sequence),))
    tokens[::7] = PLACEHOLDER_TOKEN_ID
    chances = torch.rand(9, 8)
    found = ops.force_acceptance(tokens, inputs, rows, chances)
    assert torch.equal(found, plain.force_acceptance(tokens, inputs, rows, chances))
    assert torch.equal(found[::7], tokens[::7]), "a failed row stays failed"
    first = torch.cat([torch.zeros(1, dtype=torch.long), (rows.sequence[1:] != rows.sequence[:-1]).nonzero()[:, 0] + 1])
    for sequence, window in enumerate(windows):
        last = int(first[sequence]) + len(window)
        assert found[last] == tokens[last], "the row behind the last draft token is the target's own"


def test_chances_by_position_do_not_depend_on_the_number() -> None:
    chances = chances_of((0.8, 0.5))
    assert chances.shape == (9, 8)
    assert torch.equal(chances, chances[:1].expand(9, 8))
    assert chances[0, :4].tolist() == pytest.approx([0.8, 0.5, 0.5 * 0.71, 0.5 * 0.71**2])
    assert torch.equal(chances_of(2.2)[3], torch.full((8,), acceptance_chance(2.2, 3)))


@pytest.mark.parametrize(("length", "k"), [(3.0, 3), (1.0, 3), (2.5, 7), (4.0, 3), (9.0, 2), (1.7, 1)])
def test_rounds_emit_the_length_asked_for(length: float, k: int) -> None:
    """Through the real verify op, round after round, each where the one before ended."""
    kernels = with_synthetic_acceptance(KernelSet.plain(), length, CPU)
    num_seqs, num_rounds, vocab_size = 64, 60, 16
    lengths = torch.full((num_seqs,), 5)
    emitted, histogram = 0, torch.zeros(k + 1)
    torch.manual_seed(0)
    for _ in range(num_rounds):
        windows = torch.randint(0, vocab_size, (num_seqs, k))
        inputs, rows = rows_of(windows.tolist(), list(range(num_seqs)), lengths.tolist())
        logits = torch.randn(num_seqs * (k + 1), vocab_size)
        drawn = kernels.sample_tokens(logits, inputs, rows)
        verified = kernels.verify_draft_tokens(
            drawn.token_ids,
            drawn.status,
            torch.arange(num_seqs) * (k + 1),
            rows.window_token_ids,
            torch.full((num_seqs,), k, dtype=torch.int32),
        )
        accepted = verified.num_accepted_tokens.long()
        for place in range(k):
            kept = accepted > place
            assert torch.equal(verified.output_token_ids[kept, place], windows[kept, place])
        lengths += accepted + 1
        emitted += int(accepted.sum()) + num_seqs
        histogram += torch.bincount(accepted, minlength=k + 1)
    mean = emitted / (num_seqs * num_rounds)
    assert mean == pytest.approx(min(length, k + 1), abs=0.09), histogram


def test_chances_add_up_to_the_length() -> None:
    for length in (1.0, 1.5, 3.0):
        chance = acceptance_chance(length, 3)
        assert 1 + chance + chance**2 + chance**3 == pytest.approx(length)
    assert acceptance_chance(5.0, 3) == 1.0
    assert acceptance_chance(1.0, 0) == 1.0


def test_only_the_ops_named_are_replaced() -> None:
    torch_ops = KernelSet.plain()
    routed = with_uniform_routing(torch_ops)
    assert routed.route_experts is not torch_ops.route_experts
    assert routed.sample_tokens is torch_ops.sample_tokens
    accepting = with_synthetic_acceptance(torch_ops, 2.0, CPU)
    assert accepting.verify_draft_tokens is torch_ops.verify_draft_tokens
    assert accepting.route_experts is torch_ops.route_experts
