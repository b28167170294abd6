"""kimi-nano on a GPU: KV that is not a sequence's own never reaches its text.

Pools are full of NaN, block ids are large, requests are cancelled and preempted, runners are replaced under way. With
the plain kernels the tokens equal those of each request alone in a clean pool. With the Triton-language kernels a
row's last bits may depend on its batch, so tokens are compared where the batches are the same, and elsewhere each
request must reach its full length: one NaN that is read ends it with an error.
"""

import dataclasses
from collections.abc import Callable

import pytest

from kimi_backend.runners.draft_runner import DraftRunner
from kimi_backend.runners.target_runner import TargetRunner
from kimi_backend.scheduler.sequence import Finish
from kimi_backend.scheduler.settings import SchedulerSettings
from kimi_backend.types.request import EndCause, FinishReason, GenerateRequest
from support.engine_runs import EngineHarness, Outcome
from support.nano_runs import Pair, fill_pool, nano_pair, nano_requests, without_speculation

pytestmark = pytest.mark.gpu

NAN = float("nan")
SETTINGS = SchedulerSettings(max_num_seqs=16, max_num_batched_tokens=256)
NUM_BLOCKS = 100_000
MAX_TOKENS = 40

Runners = tuple[TargetRunner, DraftRunner]


@dataclasses.dataclass
class Loaded:
    """Two pairs of runners of one kernel set: the one in use, and one to replace it by."""

    kernels: str
    pair: Pair
    runners: list[Runners]

    def start(self, requests: list[GenerateRequest], free_blocks: int, fill: float = NAN) -> EngineHarness:
        """An engine over pools full of `fill`. free_blocks: highest ids of each; somebody else holds the others."""
        self.switch(0, fill)
        harness = EngineHarness(*self.pair, SETTINGS)
        kv = harness.core.kv
        assert kv.draft_pool is not None
        for pool in (kv.target_pool, kv.draft_pool):
            pool.allocate(NUM_BLOCKS - free_blocks)
        for request in requests:
            harness.add(request)
        return harness

    def switch(self, number: int, fill: float, roles: tuple[str, ...] = ("target", "draft")) -> None:
        """Put runners of one pair in place, their pools full of `fill`."""
        target, draft = self.runners[number]
        if "target" in roles:
            fill_pool(target, fill)
            self.pair[0].runner = target
        if "draft" in roles:
            fill_pool(draft, fill)
            self.pair[1].runner = draft


@pytest.fixture(scope="module", params=["plain", "triton"])
def loaded(request: pytest.FixtureRequest) -> Loaded:
    pairs = [nano_pair(kernels=request.param, num_blocks=NUM_BLOCKS) for _ in range(2)]
    return Loaded(request.param, pairs[0], [(target.runner, draft.runner) for target, draft in pairs])


@pytest.fixture(scope="module")
def requests() -> list[GenerateRequest]:
    return nano_requests(10, MAX_TOKENS)


@pytest.fixture(scope="module")
def expected(loaded: Loaded, requests: list[GenerateRequest]) -> list[list[int]] | None:
    """Each request alone, without speculation, in a clean pool; None where tokens depend on the batch."""
    if loaded.kernels != "plain":
        return None
    found = []
    for request in without_speculation(requests):
        harness = loaded.start([request], free_blocks=100, fill=0.0)
        harness.run()
        found += tokens(harness.outcomes)
    return found


def tokens(outcomes: list[Outcome]) -> list[list[int]]:
    """The token ids of requests that all ran to their ends."""
    for outcome in outcomes:
        (finish,) = outcome.finishes
        assert finish.reason is FinishReason.LENGTH, finish
        assert len(outcome.token_ids) == outcome.request.sampling.max_tokens
    return [outcome.token_ids for outcome in outcomes]


def check(outcomes: list[Outcome], expected: list[list[int]] | None) -> None:
    found = tokens(outcomes)
    assert expected is None or found == expected


def test_poisoned_pools_and_large_ids(
    loaded: Loaded, requests: list[GenerateRequest], expected: list[list[int]] | None
) -> None:
    clean = loaded.start(requests, free_blocks=NUM_BLOCKS, fill=0.0)
    clean.run()
    poisoned = loaded.start(requests, free_blocks=600)
    lowest = NUM_BLOCKS

    def look(_: int) -> None:
        nonlocal lowest
        for outcome in poisoned.outcomes:
            if outcome.sequence.blocks is not None:
                blocks = outcome.sequence.blocks
                lowest = min([lowest, *blocks.target_ids, *blocks.draft_ids])

    poisoned.run(each_step=look)
    assert 65_535 < lowest < NUM_BLOCKS
    # The schedules are the same, so even the last bits are.
    assert tokens(poisoned.outcomes) == tokens(clean.outcomes)
    assert [o.rounds for o in poisoned.outcomes] == [o.rounds for o in clean.outcomes]
    check(poisoned.outcomes, expected)


def test_cancelled_neighbours(
    loaded: Loaded, requests: list[GenerateRequest], expected: list[list[int]] | None
) -> None:
    """Their blocks, half written, go to others at once."""
    harness = loaded.start(requests, free_blocks=120)
    neighbours = [harness.add(request) for request in nano_requests(6, 200)]

    def cancel(step: int) -> None:
        if step % 4 == 3 and neighbours:
            finish = Finish(FinishReason.CANCELLED, error="test", cause=EndCause.CLIENT)
            assert harness.core.end(neighbours.pop().sequence, finish)

    harness.run(each_step=cancel)
    assert not neighbours
    check(harness.outcomes[: len(requests)], expected)


def test_preemptions(loaded: Loaded, requests: list[GenerateRequest], expected: list[list[int]] | None) -> None:
    harness = loaded.start(requests, free_blocks=10)
    harness.run()
    assert harness.core.scheduler.num_preemptions > 2
    check(harness.outcomes, expected)


@pytest.mark.parametrize("roles", [("target",), ("draft",), ("target", "draft")], ids="+".join)
def test_replaced_runners(
    loaded: Loaded, roles: tuple[str, ...], requests: list[GenerateRequest], expected: list[list[int]] | None
) -> None:
    """Twice: away and back, each time to a pool that holds nothing but NaN."""
    harness = loaded.start(requests, free_blocks=NUM_BLOCKS)
    at: dict[int, Callable[[], None]] = {
        5: lambda: loaded.switch(1, NAN, roles),
        11: lambda: loaded.switch(0, NAN, roles),
    }
    harness.run(each_step=lambda step: at.get(step, lambda: None)())
    check(harness.outcomes, expected)
