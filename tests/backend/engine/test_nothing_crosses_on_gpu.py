"""kimi-nano on a GPU: KV that is not a sequence's own never reaches its text.

Pools are full of NaN, block ids are large, requests are cancelled and preempted, runners are replaced under way. With
the reference kernels the tokens equal those of each request alone in a clean pool. With the Triton-language kernels a
row's last bits may depend on its batch, so tokens are compared where the batches are the same, and elsewhere each
request must reach its full length: one NaN that is read ends it with an error.
"""

from collections.abc import Callable

import pytest

from kimi_backend.scheduler.sequence import Finish
from kimi_backend.scheduler.settings import SchedulerSettings
from kimi_backend.types.request import EndCause, FinishReason, GenerateRequest
from support.engine_runs import EngineHarness, Outcome
from support.nano_runs import SwitchedDraft, SwitchedTarget, nano_pair, nano_requests, without_speculation

pytestmark = pytest.mark.gpu

NAN = float("nan")
KERNELS = ["reference", "triton"]
SETTINGS = SchedulerSettings(max_num_seqs=16, max_num_batched_tokens=256)
AMPLE_BLOCKS = 600
MAX_TOKENS = 40

Pair = tuple[SwitchedTarget, SwitchedDraft]


def start(pair: Pair, requests: list[GenerateRequest], held_blocks: int = 0) -> EngineHarness:
    """held_blocks: lowest ids of both pools that somebody else holds."""
    harness = EngineHarness(*pair, SETTINGS)
    kv = harness.core.kv
    if held_blocks:
        kv.target_pool.allocate(held_blocks)
        assert kv.draft_pool is not None
        kv.draft_pool.allocate(held_blocks)
    for request in requests:
        harness.add(request)
    return harness


def tokens(outcomes: list[Outcome]) -> list[list[int]]:
    """Of requests that all ran to their ends."""
    for outcome in outcomes:
        (finish,) = outcome.finishes
        assert finish.reason is FinishReason.LENGTH, finish
        assert len(outcome.token_ids) == outcome.request.sampling.max_tokens
    return [outcome.token_ids for outcome in outcomes]


@pytest.fixture(scope="module")
def requests() -> list[GenerateRequest]:
    return nano_requests(10, MAX_TOKENS)


@pytest.fixture(scope="module")
def expected(requests: list[GenerateRequest]) -> list[list[int]]:
    """Each request alone, without speculation, by the reference kernels."""
    pair = nano_pair(kernels="reference", num_blocks=AMPLE_BLOCKS)
    found = []
    for request in without_speculation(requests):
        harness = start(pair, [request])
        harness.run()
        found += tokens(harness.outcomes)
    return found


def check(kernels: str, outcomes: list[Outcome], expected: list[list[int]]) -> None:
    found = tokens(outcomes)
    if kernels == "reference":
        assert found == expected


@pytest.mark.parametrize("kernels", KERNELS)
def test_poisoned_pools_of_100_000_blocks(
    kernels: str, requests: list[GenerateRequest], expected: list[list[int]]
) -> None:
    clean = start(nano_pair(kernels=kernels, num_blocks=AMPLE_BLOCKS), requests)
    clean.run()
    poisoned = start(nano_pair(kernels=kernels, num_blocks=100_000, fill=NAN), requests, held_blocks=99_000)
    highest = 0

    def look(_: int) -> None:
        nonlocal highest
        for outcome in poisoned.outcomes:
            if outcome.sequence.blocks is not None:
                highest = max(highest, *outcome.sequence.blocks.target_ids, *(outcome.sequence.blocks.draft_ids or [0]))

    poisoned.run(each_step=look)
    assert highest > 65_535 * 1.5
    # The schedules are the same, so even the last bits are.
    assert tokens(poisoned.outcomes) == tokens(clean.outcomes)
    assert [o.rounds for o in poisoned.outcomes] == [o.rounds for o in clean.outcomes]
    check(kernels, poisoned.outcomes, expected)


@pytest.mark.parametrize("kernels", KERNELS)
def test_cancelled_neighbours(kernels: str, requests: list[GenerateRequest], expected: list[list[int]]) -> None:
    """Their blocks, half written, go to others at once."""
    harness = start(nano_pair(kernels=kernels, num_blocks=120, fill=NAN), requests)
    neighbours = [harness.add(request) for request in nano_requests(6, 200)]

    def cancel(step: int) -> None:
        if step % 4 == 3 and neighbours:
            finish = Finish(FinishReason.CANCELLED, error="test", cause=EndCause.CLIENT)
            assert harness.core.end(neighbours.pop().sequence, finish)

    harness.run(each_step=cancel)
    assert not neighbours
    check(kernels, harness.outcomes[: len(requests)], expected)


@pytest.mark.parametrize("kernels", KERNELS)
def test_preemptions(kernels: str, requests: list[GenerateRequest], expected: list[list[int]]) -> None:
    harness = start(nano_pair(kernels=kernels, num_blocks=12, fill=NAN, max_model_len=160), requests)
    harness.run()
    assert harness.core.scheduler.num_preemptions > 2
    check(kernels, harness.outcomes, expected)


def replace_target(pair: Pair, kernels: str) -> None:
    pair[0].runner = nano_pair(kernels=kernels, num_blocks=AMPLE_BLOCKS, fill=NAN)[0].runner


def replace_draft(pair: Pair, kernels: str) -> None:
    pair[1].runner = nano_pair(kernels=kernels, num_blocks=AMPLE_BLOCKS, fill=NAN)[1].runner


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("replace", [replace_target, replace_draft])
def test_restarted_runners(
    kernels: str,
    replace: Callable[[Pair, str], None],
    requests: list[GenerateRequest],
    expected: list[list[int]],
) -> None:
    pair = nano_pair(kernels=kernels, num_blocks=AMPLE_BLOCKS, fill=NAN)
    harness = start(pair, requests)
    harness.run(each_step=lambda step: replace(pair, kernels) if step in (5, 11) else None)
    check(kernels, harness.outcomes, expected)
