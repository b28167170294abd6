import dataclasses
from dataclasses import replace

import numpy as np
import pytest
import torch

from kimi_backend.errors import ConfigError, InvalidRequestError
from kimi_backend.runners.kv_pool import KvPool
from kimi_backend.runners.plan_checks import RunnerLimits
from kimi_backend.runners.target_runner import TargetRunner
from kimi_backend.types.plan import RowPlan, SamplingPlan, TargetPlan, TargetReply
from kimi_kernels.kernel_set import KernelSet
from kimi_kernels.sampling_inputs import STATUS_NO_TOKEN_LEFT, STATUS_NOT_FINITE
from support.target_steps import TargetSteps, build_target
from support.tiny_checkpoints import random_target
from support.tiny_configs import target_config
from support.tiny_runners import BLOCK_SIZE, LIMITS, NUM_BLOCKS, OwnedRunner, target_runner

CONFIG = target_config(num_hidden_layers=3)
AUX_LAYER_IDS = (1, 2, 3)
TOKENS = torch.randint(0, 96, (3, 40), generator=torch.Generator().manual_seed(0)).tolist()
BLOCKS = np.array([[7, 3, 39, 2**30], [0, 12, 5, 2**30], [20, 21, 22, 2**30]], np.int32)


@pytest.fixture
def owned() -> OwnedRunner:
    return target_runner(CONFIG, aux_layer_ids=AUX_LAYER_IDS)


@pytest.fixture(scope="module")
def expected_logits() -> list[torch.Tensor]:
    """[40, vocab_size] of each sequence, from the model alone."""
    target = build_target(CONFIG, random_target(CONFIG))
    return [TargetSteps(target, KernelSet.plain(), [40]).run(tokens, [40])[0] for tokens in TOKENS]


def plan(chunks: list[tuple[int, int, list[int], int]], **fields: object) -> TargetPlan:
    """chunks: (sequence, tokens before, tokens, sampled rows)."""
    order = [sequence for sequence, *_ in chunks]
    sampled = np.array([count for *_, count in chunks], np.int32)
    rows = RowPlan(
        token_ids=np.concatenate([np.array(tokens, np.int32) for _, _, tokens, _ in chunks]),
        query_lens=np.array([len(tokens) for _, _, tokens, _ in chunks], np.int32),
        seq_lens=np.array([start + len(tokens) for _, start, tokens, _ in chunks], np.int32),
        block_table=BLOCKS[order],
    )
    made = TargetPlan.given(
        step_id=17,
        rows=rows,
        num_sampled_rows=sampled,
        sampling=SamplingPlan.plain(int((sampled > 0).sum())),
        num_logprobs=None,
        wants_aux=np.zeros(len(chunks), np.bool_),
    )
    return replace(made, **fields)


def prefill(owned: OwnedRunner, length: int = 20) -> TargetReply:
    """The first tokens of all three sequences; the middle one does not draw."""
    return owned.runner.launch(plan([(s, 0, TOKENS[s][:length], int(s != 1)) for s in range(3)])).wait()


def test_it_describes_itself(owned: OwnedRunner) -> None:
    description = owned.runner.describe()
    assert (description.role, description.vocab_size, description.draft_vocab_size) == ("target", 96, None)
    assert (description.block_size, description.num_blocks) == (BLOCK_SIZE, NUM_BLOCKS)
    assert (description.aux_layer_ids, description.hidden_size) == (AUX_LAYER_IDS, 64)
    assert (description.kv_cache_dtype, description.device) == ("float32", "cpu")
    assert description.max_model_len == LIMITS.max_model_len


def test_chunks_draw_the_models_argmax(owned: OwnedRunner, expected_logits: list[torch.Tensor]) -> None:
    reply = prefill(owned)
    best = [int(expected_logits[sequence][19].argmax()) for sequence in (0, 2)]
    assert (reply.step_id, reply.runner_epoch) == (17, owned.runner.describe().runner_epoch)
    assert reply.output_token_ids.tolist() == [[best[0]], [best[1]]]
    assert reply.num_accepted_tokens.tolist() == [0, 0]
    assert reply.seq_status.tolist() == [0, 0, 0]
    assert reply.aux.tensor is None


def test_draft_tokens_are_accepted_while_they_are_the_argmax(
    owned: OwnedRunner, expected_logits: list[torch.Tensor]
) -> None:
    """Verify rows are [token, drafts]; sequence 0 drafts its own continuation, sequence 2 one wrong token."""
    prefill(owned)
    best = [logits.argmax(dim=1).tolist() for logits in expected_logits]
    # Row 20 embeds TOKENS[20] and draws best[20]; a draft equal to it is accepted, and row 21 goes on from there.
    right = [TOKENS[0][20], best[0][20], 5]
    wrong = [TOKENS[2][20], (best[2][20] + 1) % 96]
    reply = owned.runner.launch(plan([(0, 20, right, 3), (1, 20, TOKENS[1][20:25], 0), (2, 20, wrong, 2)])).wait()
    follow = TargetSteps(build_target(CONFIG, random_target(CONFIG)), KernelSet.plain(), [40])
    logits, _ = follow.run([*TOKENS[0][:20], *right], [23])
    drawn = logits[20:].argmax(dim=1).tolist()
    assert drawn[0] == best[0][20]
    assert drawn[1] != 5
    assert reply.output_token_ids.tolist() == [[drawn[0], drawn[1], -1], [best[2][20], -1, -1]]
    assert reply.num_accepted_tokens.tolist() == [1, 0]


def test_logprobs_stand_beside_output_tokens(owned: OwnedRunner, expected_logits: list[torch.Tensor]) -> None:
    prefill(owned)
    best = [int(logits[20].argmax()) for logits in expected_logits]
    chunks = [(2, 20, [TOKENS[2][20]], 1), (0, 20, [TOKENS[0][20], best[0], 1, 2], 4)]
    reply = owned.runner.launch(plan(chunks, num_logprobs=3)).wait()
    assert reply.logprobs is not None and reply.top_logprobs is not None and reply.top_logprob_ids is not None
    assert reply.logprobs.shape == (2, 4)
    assert reply.top_logprob_ids.shape == reply.top_logprobs.shape == (2, 4, 3)
    for row, sequence in ((0, 2), (1, 0)):
        expected = expected_logits[sequence][20].log_softmax(dim=0)
        top = expected.topk(3)
        np.testing.assert_allclose(reply.logprobs[row, 0], expected[best[sequence]], rtol=1e-5)
        assert reply.top_logprob_ids[row, 0].tolist() == top.indices.tolist()
        np.testing.assert_allclose(reply.top_logprobs[row, 0], top.values, rtol=1e-5)
    accepted = reply.num_accepted_tokens.tolist()
    is_used = np.arange(4) <= np.array(accepted)[:, None]
    assert accepted[0] == 0
    assert accepted[1] >= 1
    assert np.isfinite(reply.logprobs[is_used]).all() and np.isnan(reply.logprobs[~is_used]).all()
    assert (reply.top_logprob_ids[~is_used] == -1).all()


def test_the_logit_mask_reaches_its_row(owned: OwnedRunner, expected_logits: list[torch.Tensor]) -> None:
    only = 37
    mask = np.zeros((1, 3), np.int32)
    mask[0, only // 32] = 1 << (only % 32)
    chunks = [(0, 0, TOKENS[0][:20], 1), (2, 0, TOKENS[2][:20], 1)]
    reply = owned.runner.launch(plan(chunks, logit_mask=mask, masked_rows=np.array([1], np.int32))).wait()
    assert reply.output_token_ids.tolist() == [[int(expected_logits[0][19].argmax())], [only]]


def test_a_sequence_with_nothing_left_to_draw_fails_alone(
    owned: OwnedRunner, expected_logits: list[torch.Tensor]
) -> None:
    mask = np.zeros((1, 3), np.int32)
    chunks = [(1, 0, TOKENS[1][:9], 0), (0, 0, TOKENS[0][:20], 1), (2, 0, TOKENS[2][:20], 1)]
    reply = owned.runner.launch(plan(chunks, logit_mask=mask, masked_rows=np.array([0], np.int32))).wait()
    assert reply.seq_status.tolist() == [0, STATUS_NO_TOKEN_LEFT, 0]
    assert reply.output_token_ids.tolist() == [[-1], [int(expected_logits[2][19].argmax())]]


def test_draft_tokens_count_for_the_penalties_of_later_rows(owned: OwnedRunner) -> None:
    """Token 37 is biased to win every row, and penalised once it stands in the output, be it as a draft token."""
    prefill(owned)
    sampling = SamplingPlan.plain(
        1,
        presence_penalty=200.0,
        penalty_offsets=np.array([0, 1], np.int32),
        penalty_ids=np.array([TOKENS[0][0]], np.int32),
        penalty_counts=np.array([0], np.int32),
        penalty_in_prompt=np.array([True]),
        bias_offsets=np.array([0, 1], np.int32),
        bias_ids=np.array([37], np.int32),
        bias_values=np.array([50.0], np.float32),
    )
    reply = owned.runner.launch(plan([(0, 20, [TOKENS[0][20], 37, 37], 3)], sampling=sampling)).wait()
    drawn = reply.output_token_ids[0].tolist()
    assert drawn[0] == 37
    assert drawn[1] not in (-1, 37)
    assert reply.num_accepted_tokens.tolist() == [1]


def test_aux_hidden_states_come_by_row_when_a_sequence_wants_them(owned: OwnedRunner) -> None:
    chunks = [(s, 0, TOKENS[s][:20], 1) for s in range(3)]
    reply = owned.runner.launch(plan(chunks, wants_aux=np.array([False, True, False]))).wait()
    steps = TargetSteps(
        build_target(CONFIG, random_target(CONFIG)), KernelSet.plain(), [40], aux_layer_ids=AUX_LAYER_IDS
    )
    _, expected = steps.run(TOKENS[1][:20], [20])
    assert reply.aux.tensor is not None
    assert reply.aux.tensor.shape == (60, 3 * 64)
    assert torch.equal(reply.aux.tensor[20:40], expected)


@pytest.mark.parametrize("poisoned", [0, 1, 2])
def test_a_sequence_whose_kv_is_not_finite_fails_alone(owned: OwnedRunner, poisoned: int) -> None:
    """Sampling sequences and middle chunks alike."""
    clean = target_runner(CONFIG, aux_layer_ids=AUX_LAYER_IDS)
    step = plan([(0, 20, TOKENS[0][20:23], 3), (1, 20, TOKENS[1][20:30], 0), (2, 20, TOKENS[2][20:21], 1)])
    replies = []
    for runner in (clean, owned):
        prefill(runner)
        if runner is owned:
            runner.pool.tensor[1, BLOCKS[poisoned, 0], 5, 3] = float("nan")
        replies.append(runner.runner.launch(step).wait())
    expected_status = np.where(np.arange(3) == poisoned, STATUS_NOT_FINITE, 0)
    assert replies[0].seq_status.tolist() == [0, 0, 0]
    assert replies[1].seq_status.tolist() == expected_status.tolist()
    for index, sequence in ((0, 0), (1, 2)):
        if sequence == poisoned:
            assert (replies[1].output_token_ids[index] == -1).all()
        else:
            assert replies[1].output_token_ids[index].tolist() == replies[0].output_token_ids[index].tolist()


def test_a_wrong_plan_runs_nothing(owned: OwnedRunner) -> None:
    before = owned.pool.tensor.clone()
    with pytest.raises(InvalidRequestError, match=r"token_ids\[2\]: 96 given, 0 to 95"):
        owned.runner.launch(plan([(0, 0, [1, 2, 96], 1)])).wait()
    assert torch.equal(owned.pool.tensor.isnan(), before.isnan())


def test_a_step_can_be_replayed(owned: OwnedRunner) -> None:
    prefill(owned)
    step = plan([(0, 20, TOKENS[0][20:24], 4)], wants_aux=np.array([True]))
    first, second = owned.runner.launch(step).wait(), owned.runner.launch(step).wait()
    assert first.output_token_ids.tolist() == second.output_token_ids.tolist()
    assert torch.equal(first.aux.tensor, second.aux.tensor)  # type: ignore[arg-type]


def test_max_model_len_beyond_the_checkpoints_is_refused() -> None:
    owned = target_runner(CONFIG)
    model = build_target(CONFIG, random_target(CONFIG))
    limits = RunnerLimits(max_num_batched_tokens=16, max_num_seqs=1, max_model_len=513)
    with pytest.raises(ConfigError, match="max_model_len: 513 given, at most 512"):
        TargetRunner(model, KernelSet.plain(), owned.pool, limits)


def test_a_kernel_set_with_a_prefill_kernel_serves_any_order_of_chunks() -> None:
    """Long chunks first, a verify after them: the same tokens as all absorbed."""
    split = dataclasses.replace(KernelSet.plain(), absorb_prefill=False)
    replies = []
    for kernels in (None, split):
        owned = target_runner(CONFIG, aux_layer_ids=AUX_LAYER_IDS, kernels=kernels)
        prefill(owned)
        chunks = [(1, 20, TOKENS[1][20:32], 1), (0, 20, TOKENS[0][20:23], 3), (2, 20, TOKENS[2][20:35], 1)]
        replies.append(owned.runner.launch(plan(chunks)).wait())
    assert replies[0].output_token_ids.tolist() == replies[1].output_token_ids.tolist()


@pytest.mark.parametrize(
    ("dtype", "scale", "tolerance"), [(torch.bfloat16, 1.0, 0.05), (torch.float8_e4m3fn, 0.1, 0.3)]
)
def test_pools_of_fewer_bits(
    dtype: torch.dtype, scale: float, tolerance: float, expected_logits: list[torch.Tensor]
) -> None:
    """Log-probabilities move by the rounding of the cached values, and no more."""
    model, kernels = build_target(CONFIG, random_target(CONFIG)), KernelSet.plain()
    pool = KvPool.allocate(model.kv_pool_shape, NUM_BLOCKS, BLOCK_SIZE, dtype, torch.device("cpu"), scale)
    runner = TargetRunner(model, kernels, pool, LIMITS, AUX_LAYER_IDS)
    assert runner.describe().kv_cache_dtype == str(dtype).removeprefix("torch.")
    assert pool.num_bytes == model.config.kv_bytes_per_token(pool.dtype_name) * NUM_BLOCKS * BLOCK_SIZE
    reply = runner.launch(plan([(0, 0, TOKENS[0], 1)], num_logprobs=96)).wait()
    assert reply.top_logprobs is not None and reply.top_logprob_ids is not None
    expected = expected_logits[0][39].log_softmax(dim=0).numpy()
    difference = np.abs(reply.top_logprobs[0, 0] - expected[reply.top_logprob_ids[0, 0]]).max()
    assert 1e-4 < difference < tolerance
