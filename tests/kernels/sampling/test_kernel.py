"""The sampling kernels under Triton-language's interpreter: states that a draw goes through, against the naive judge.

Tiles are a few columns wide here, so that small vocabularies have many splits, tiles and borders.
"""

import random

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from kimi_kernels.sampling import kernel, kernel_few, kernel_noise, kernel_tuning, naive, plain
from kimi_kernels.sampling.gumbel import gumbel_from_bits
from kimi_kernels.sampling.kernel_launch import SamplingCall
from kimi_kernels.sampling.kernel_rows import STATE_DONE, STATE_DOUBT, STATE_ESTIMATE, STATE_LIST, STATE_SELECT
from kimi_kernels.sampling.philox import noise_bits
from kimi_kernels.sampling.processors import ColumnOrder, process_logits
from kimi_kernels.sampling.weights import token_weights
from support.interpreted import INTERPRETED
from support.sampling_cases import SequenceCase, random_case, sampling_tensors
from support.sampling_logits import random_mask, vocabulary_map

pytestmark = [
    *INTERPRETED,
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # NumPy's, where the device would make an infinity
]


def test_tiles_are_small() -> None:
    assert kernel_tuning.INTERPRETED
    assert kernel_tuning.TUNING.draw_columns < 64


@triton.jit
def _noise_kernel(BITS, TOKEN_BITS, NOISE, index, seed, N: tl.constexpr):
    key_low, key_high = seed.to(tl.uint32), (seed >> 32).to(tl.uint32)
    bits = kernel_noise.bits_of_blocks(index.to(tl.uint32), 0, key_low, key_high, N // 4)
    at = tl.arange(0, N // 4)[:, None] * 4 + tl.arange(0, 4)[None, :]
    tl.store(BITS + at, bits.to(tl.int64))
    tl.store(NOISE + at, kernel_noise.gumbel(bits))
    token = tl.arange(0, N)
    tl.store(
        TOKEN_BITS + token, kernel_noise.bits_of_tokens(index.to(tl.uint32), token, key_low, key_high).to(tl.int64)
    )


def test_noise_bit_for_bit() -> None:
    bits, token_bits = torch.zeros(2, 256, dtype=torch.int64)
    noise = torch.zeros(256)
    _noise_kernel[(1,)](bits, token_bits, noise, 2**31 + 9, -(2**62) + 12345, N=256)
    expected = noise_bits(torch.tensor([-(2**62) + 12345]), torch.tensor([2**31 + 9]), 256)[0]
    assert torch.equal(bits, expected)
    assert torch.equal(token_bits, expected)
    assert torch.equal(noise, gumbel_from_bits(expected))


@triton.jit
def _values_kernel(BITS, NOISE, Y, WEIGHT, KEY, BOUNDS, best, N: tl.constexpr):
    at = tl.arange(0, N)
    bits = tl.load(BITS + at).to(tl.uint32)
    y = tl.load(Y + at)
    noise = kernel_noise.gumbel(bits)
    tl.store(NOISE + at, noise)
    tl.store(WEIGHT + at, kernel_noise.token_weight(y, best).to(tl.int64))
    tl.store(KEY + at, kernel_noise.order_key(y).to(tl.int64))
    # A score reaches itself as a bound.
    score = y + noise
    lowered = kernel_noise.lowered_bound(score)
    base = lowered - 3.0
    likelihood = kernel_noise.likelihood(y, kernel_noise.LOG2_E, base)
    factor = kernel_noise.likelihood(base, kernel_noise.LOG2_E, lowered)
    is_right = (kernel_noise.reach(bits, likelihood, factor) >= 0.0) | (y == -float("inf"))
    tl.store(BOUNDS + at, is_right)


def test_noise_weights_and_keys_at_the_edges() -> None:
    edges = [0, 1, 2**24 + 1, 2**31 - 1, 2**31, 2**31 + 1, 3 * 2**30, 2**32 - 2, 2**32 - 1, 2**32 - 513]
    generator = torch.Generator().manual_seed(0)
    bits = torch.cat((torch.tensor(edges), torch.randint(0, 2**32, (1014,), generator=generator)))
    y = torch.cat((torch.tensor([0.0, -0.0, -1e-10, -27.7, -28.0, -1e30]), -torch.rand(1018, generator=generator) * 30))
    noise, weight, key, reached = torch.zeros(1024), *torch.zeros(2, 1024, dtype=torch.int64), torch.zeros(1024)
    _values_kernel[(1,)](bits, noise, y, weight, key, reached, 0.0, N=1024)
    assert torch.equal(noise, gumbel_from_bits(bits))
    assert torch.equal(weight, token_weights(y[None])[0])
    order = np.argsort(y.numpy(), kind="stable")
    assert (np.diff(key.numpy()[order]) >= 0).all()
    assert key[0] == key[1]
    assert reached.all()


@pytest.mark.parametrize("seed", range(6))
def test_processed_logits_bit_for_bit(seed: int) -> None:
    """Windows repeat tokens of prompt, output and each other."""
    rng = random.Random(seed)
    cases = [random_case(rng, 20, num_window=5) for _ in range(4)]
    for case in cases:
        case.repetition_penalty, case.frequency_penalty, case.presence_penalty = 1.3, 0.3, rng.choice((0.0, 0.6))
    columns = rng.sample(range(20), 15) if seed % 2 else list(range(20))
    draft_map = vocabulary_map(columns, 20) if seed % 2 else None
    num_rows = sum(len(case.rows) for case in cases)
    logits = torch.randn(num_rows, len(columns), generator=torch.Generator().manual_seed(seed))
    inputs, rows = sampling_tensors(cases, random_mask(rng, num_rows, 20) if seed == 2 else None)
    call = SamplingCall(logits, inputs, rows, draft_map)
    call.process()
    assert call.uses_work_rows.all()
    order = ColumnOrder.from_map(draft_map)
    expected = logits.clone() if order.source_column is None else logits[:, order.source_column]
    process_logits(expected, inputs, rows, order)
    got = call.work if order.source_column is None else call.work[:, order.source_column]
    assert torch.equal(got, expected)


def test_all_candidates_fall() -> None:
    """A flat tail that top-p cuts wins the noise, so none of the candidates survives and the general way is taken."""
    logits = torch.zeros(1, 150)
    logits[:, 77], logits[:, 78] = 0.5, 0.4
    inputs, rows = sampling_tensors([SequenceCase(top_p=0.011, seed=8)])
    call = SamplingCall(logits, inputs, rows, None)
    call.draw()
    call.check()
    assert call.state.item() == STATE_SELECT.value
    call.select()
    expected = naive.sample_tokens(logits, inputs, rows).token_ids.item()
    assert call.token_ids.item() == expected
    assert expected in (77, 78)


def test_candidates_fall_round_after_round() -> None:
    """A flat row of which top-p keeps a few tokens: each round of four candidates ends a little higher."""
    logits = torch.randn(1, 240, generator=torch.Generator().manual_seed(2)).expand(4, 240) * 0.3
    inputs, rows = sampling_tensors([SequenceCase(top_p=0.02, seed=seed) for seed in range(4)])
    call = SamplingCall(logits.contiguous(), inputs, rows, None)
    call.draw()
    call.check()
    assert (call.state == STATE_SELECT.value).sum() >= 2
    call.select()
    expected = naive.sample_tokens(logits, inputs, rows).token_ids
    assert torch.equal(call.token_ids, expected)
    assert len(set(expected.tolist())) > 1


@pytest.mark.parametrize("spread", [1.0, 4.0], ids=["flat", "peaked"])
def test_most_candidates_survive_for_certain(spread: float) -> None:
    """They survive without a second reading: their own mass is enough, or they lie above a logit with little mass
    below."""
    logits = torch.randn(8, 400, generator=torch.Generator().manual_seed(5))[3:7] * spread
    inputs, rows = sampling_tensors([SequenceCase(top_p=0.9, seed=seed) for seed in range(3, 7)])
    call = SamplingCall(logits, inputs, rows, None)
    call.draw()
    is_done = call.state == STATE_DONE.value
    assert 2 <= is_done.sum() < 4
    expected = naive.sample_tokens(logits, inputs, rows).token_ids
    assert torch.equal(call.token_ids[is_done], expected[is_done])
    call.check()
    call.select()
    assert torch.equal(call.token_ids, expected)


def test_tiles_below_the_first_candidate_are_not_read() -> None:
    """They hold what would win if it were read: the sums come from the tiles above the first candidate alone."""
    logits = torch.randn(4, 400, generator=torch.Generator().manual_seed(3)) * 1.5
    logits[:, 320:] -= 30.0
    inputs, rows = sampling_tensors([SequenceCase(top_p=0.6, seed=seed) for seed in range(4)])
    expected = naive.sample_tokens(logits, inputs, rows).token_ids
    call = SamplingCall(logits, inputs, rows, None)
    call.draw()
    assert (call.state == STATE_ESTIMATE.value).any()
    logits[:, 320:] = float("nan")
    call.check()
    assert torch.equal(call.token_ids[call.state == STATE_DONE.value], expected[call.state == STATE_DONE.value])
    assert not (call.state == STATE_DOUBT.value).any()


@pytest.mark.parametrize("num_allowed", [1, 5])
def test_few_tokens_are_allowed(num_allowed: int) -> None:
    """Under a grammar most tiles hold nothing, and a split may never have four candidates."""
    generator = torch.Generator().manual_seed(num_allowed)
    logits = torch.full((6, 300), float("-inf"))
    for row in range(6):
        allowed = torch.randperm(300, generator=generator)[:num_allowed]
        logits[row, allowed] = torch.randn(num_allowed, generator=generator) * (0.5, 2.0)[row % 2]
    settings = [(0.3, 0.0), (0.7, 0.0), (0.95, 0.0), (1.0, 0.1), (0.9, 0.1), (1.0, 0.0)]
    cases = [SequenceCase(top_p=top_p, min_p=min_p, seed=seed) for seed, (top_p, min_p) in enumerate(settings)]
    inputs, rows = sampling_tensors(cases)
    drawn = kernel.sample_tokens(logits, inputs, rows).token_ids
    assert torch.equal(drawn, naive.sample_tokens(logits, inputs, rows).token_ids)


def test_min_p_alone_is_drawn_from_a_list() -> None:
    """The logits are so flat that the four best by score are mostly too unlikely."""
    logits = torch.randn(4, 300, generator=torch.Generator().manual_seed(7)) * 0.8
    inputs, rows = sampling_tensors([SequenceCase(min_p=0.8, seed=seed) for seed in range(4)])
    call = SamplingCall(logits, inputs, rows, None)
    call.draw()
    assert (call.state == STATE_LIST.value).any()
    call.check()
    call.select()
    assert torch.equal(call.token_ids, naive.sample_tokens(logits, inputs, rows).token_ids)


def test_sums_in_doubt_are_counted_in_integers() -> None:
    """Weights 4 : 2 : 1 : 1 with top-p 1/2: float32 cannot tell whether the second token survives."""
    logits = torch.tensor([0.0, -0.6931472, -1.3862944, -1.3862944]).expand(12, 4).contiguous()
    inputs, rows = sampling_tensors([SequenceCase(top_p=0.5, seed=seed) for seed in range(12)])
    call = SamplingCall(logits, inputs, rows, None)
    call.draw()
    call.check()
    in_doubt = call.state == STATE_DOUBT.value
    assert in_doubt.any() and not in_doubt.all()
    call.select()
    assert torch.equal(call.token_ids, naive.sample_tokens(logits, inputs, rows).token_ids)


def test_top_k_is_selected_from_a_list() -> None:
    logits = torch.randn(3, 400, generator=torch.Generator().manual_seed(6))
    logits[1] = logits[1].round()
    logits[2, :396] = float("-inf")  # fewer tokens than k
    inputs, rows = sampling_tensors([SequenceCase(top_k=top_k, top_p=0.9, seed=4) for top_k in (5, 5, 9)])
    call = SamplingCall(logits, inputs, rows, None)
    call.draw()
    call.check()
    assert call.state.tolist() == [STATE_LIST.value, STATE_LIST.value, STATE_SELECT.value]
    assert call.zeros[4, 0] >= 5
    call.select()
    assert torch.equal(call.token_ids, naive.sample_tokens(logits, inputs, rows).token_ids)


@pytest.mark.parametrize("min_p", [0.0, 1e-6, 0.95], ids=["of-top-k", "far-from-min-p", "of-min-p"])
def test_top_k_cuts_equals_by_id(min_p: float) -> None:
    logits = torch.zeros(6, 90)
    logits[:, 50] = 0.1
    inputs, rows = sampling_tensors([SequenceCase(top_k=4, min_p=min_p, seed=seed) for seed in range(6)])
    drawn = kernel.sample_tokens(logits, inputs, rows).token_ids
    assert torch.equal(drawn, naive.sample_tokens(logits, inputs, rows).token_ids)
    assert set(drawn.tolist()) <= {0, 1, 2, 50}


@triton.jit
def _last_kernel(EQUAL, LAST, count, N: tl.constexpr):
    token = tl.arange(0, N)
    tl.store(LAST, kernel_few._last_of(token, tl.load(EQUAL + token) != 0, count, N))


def test_the_last_of_equal_tokens_for_every_count() -> None:
    equal = (torch.rand(64, generator=torch.Generator().manual_seed(9)) < 0.6).to(torch.int32)
    places = equal.nonzero().flatten().tolist()
    last = torch.zeros(len(places), dtype=torch.int32)
    for number in range(len(places)):
        _last_kernel[(1,)](equal, last[number:], number + 1, N=64)
    assert last.tolist() == places


def test_bans_of_everything_and_rows_that_are_not_finite() -> None:
    banned = SequenceCase(bans=dict.fromkeys(range(70), 10**6), top_p=0.5)
    cases = [SequenceCase(top_p=0.9), banned, SequenceCase(temperature=0.0), SequenceCase(bias={3: 1.0})]
    logits = torch.randn(4, 70, generator=torch.Generator().manual_seed(1))
    logits[2, 69] = float("nan")
    logits[3, 0] = float("inf")
    inputs, rows = sampling_tensors(cases)
    got = kernel.sample_tokens(logits, inputs, rows)
    assert got.status.tolist() == [0, 2, 1, 1]
    assert got.token_ids.tolist() == naive.sample_tokens(logits, inputs, rows).token_ids.tolist()


def test_ties_across_splits_take_the_lowest_target_id() -> None:
    columns = list(range(200, 0, -1))
    inputs, rows = sampling_tensors([SequenceCase(temperature=0.0), SequenceCase(temperature=0.0)])
    logits = torch.zeros(2, 200)
    logits[1, [3, 60, 190]] = 1.0
    got = kernel.sample_tokens(logits, inputs, rows, vocabulary_map(columns, 256))
    assert got.token_ids.tolist() == [1, columns[190]]
    assert kernel.sample_tokens(logits, inputs, rows).token_ids.tolist() == [0, 3]


def test_strided_logits_and_logprobs() -> None:
    wide = torch.randn(2, 80, generator=torch.Generator().manual_seed(4))
    inputs, rows = sampling_tensors([SequenceCase(rows=[0, 0], top_k=9)])
    for logits in (wide[:, :50], wide[:, ::2]):
        got = kernel.sample_tokens(logits, inputs, rows, num_logprobs=3)
        expected = plain.sample_tokens(logits, inputs, rows, num_logprobs=3)
        assert torch.equal(got.token_ids, expected.token_ids)
        assert got.logprobs is not None and expected.logprobs is not None
        torch.testing.assert_close(got.logprobs, expected.logprobs, rtol=0, atol=1e-5)
        assert got.top_logprob_ids is not None and expected.top_logprob_ids is not None
        assert torch.equal(got.top_logprob_ids, expected.top_logprob_ids)
