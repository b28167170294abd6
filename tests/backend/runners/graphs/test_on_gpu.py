"""CUDA graphs against the same steps without: replays over other batches, lengths, blocks and sampling parameters."""

import itertools
import logging
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from kimi_backend.runners.draft_runner import DraftRunner
from kimi_backend.runners.graphs.recorder import EagerRecorder, GraphRecorder, Recorder, Run
from kimi_backend.runners.load.loading import load_pair
from kimi_backend.runners.plan_checks import RunnerLimits
from kimi_backend.runners.target_runner import TargetRunner
from kimi_backend.scheduler.settings import SchedulerSettings
from kimi_backend.spec_decode.policy import PolicyName
from kimi_backend.types.plan import TargetPlan, TargetReply
from kimi_backend.types.request import GenerateRequest, SamplingParams
from kimi_kernels.kernel_set import KernelSet
from kimi_kernels.synthetic_sets import with_synthetic_acceptance
from support.captured_runners import Setting, runner_pair
from support.engine_runs import EngineHarness, generate
from support.masked_loop import MaskedLoop
from support.nano_runs import nano_requests, nano_settings
from support.random_policy import RandomPolicy
from support.speculative_loop import SpeculativeLoop, Step
from support.tiny_configs import HOPPER_WIDTHS

pytestmark = pytest.mark.gpu

logger = logging.getLogger(__name__)

# Few shapes, because each costs a second to compile; 2 and 5 sequences are padded.
LIMITS = RunnerLimits(
    max_num_batched_tokens=512,
    max_num_seqs=6,
    max_model_len=512,
    max_speculative_tokens=3,
    capture_batch_sizes=(1, 3, 6),
)
KS = [3, 0, 2, 1, 3, 2]
ACCEPTING = (
    with_synthetic_acceptance(KernelSet.triton(), 2.5, torch.device("cuda")) if torch.cuda.is_available() else None
)
"""Draft tokens become the text: random models agree on none by themselves."""


def setting(**fields: Any) -> Setting:
    return Setting(
        **({"kernels": KernelSet.triton()} | fields),
        device=torch.device("cuda"),
        dtype=torch.bfloat16,
        limits=LIMITS,
        num_blocks=64,
        block_size=64,
    )


def loop(
    kind: str,
    recorder: Recorder | None,
    ks: list[int],
    where: Setting | None = None,
    make: type[SpeculativeLoop] = SpeculativeLoop,
    **fields: Any,
) -> SpeculativeLoop:
    generator = np.random.default_rng(len(ks))
    prompts = [generator.integers(0, 96, generator.integers(3, 80)).tolist() for _ in ks]
    target, draft = runner_pair(where or setting(), kind, recorder, **HOPPER_WIDTHS)
    return make(target, draft, prompts, list(ks), **fields)


def graph_recorder() -> GraphRecorder:
    return GraphRecorder(torch.device("cuda"))


def assert_equal_replies(graph: Step, eager: Step) -> None:
    """Both ran the same buckets, so every number is the same."""
    assert graph.target_reply.seq_status.tolist() == eager.target_reply.seq_status.tolist()
    assert graph.target_reply.output_token_ids.tolist() == eager.target_reply.output_token_ids.tolist()
    assert graph.target_reply.num_accepted_tokens.tolist() == eager.target_reply.num_accepted_tokens.tolist()
    assert torch.equal(graph.target_reply.aux.tensor, eager.target_reply.aux.tensor)  # type: ignore[arg-type]
    assert graph.draft_reply is not None and eager.draft_reply is not None
    assert graph.draft_reply.seq_status.tolist() == eager.draft_reply.seq_status.tolist()
    assert graph.draft_reply.draft_token_ids.tolist() == eager.draft_reply.draft_token_ids.tolist()


@pytest.mark.parametrize("kind", ["mla31", "mha"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_replays_equal_the_recorded_function(kind: str, temperature: float) -> None:
    """The same buckets run as CUDA graphs and as plain calls, bit for bit, from pools full of NaN: what a graph would
    read of an earlier step, or of a slot that nobody wrote, shows."""
    loops = [
        loop(kind, recorder, KS, temperature=temperature, seed=3) for recorder in (graph_recorder(), EagerRecorder())
    ]
    for order in ([0, 1, 2, 3, 4, 5], [5, 3, 1, 0, 2, 4], [2], [4, 0, 1], [1, 2, 3, 4, 5, 0], [0, 2]):
        steps = [in_order(one, order) for one in loops]
        assert_equal_replies(*steps)
        assert not steps[0].target_reply.seq_status.any()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_masks_reach_the_captured_draws(temperature: float) -> None:
    """Replayed, and as plain calls: steps that mask some rows, and steps behind them that mask none."""
    loops = [
        loop("mla31", recorder, KS, make=MaskedLoop, temperature=temperature, seed=3)
        for recorder in (graph_recorder(), EagerRecorder())
    ]
    are_masked = set()
    for _ in range(8):
        steps = [one.step() for one in loops]
        assert_equal_replies(*steps)
        plan, reply = steps[0].target_plan, steps[0].target_reply
        are_masked.add(plan.logit_mask is not None)
        if plan.logit_mask is not None and plan.masked_rows is not None:
            assert_fits_masks(plan, reply)
    assert are_masked == {True, False}


def assert_fits_masks(plan: TargetPlan, reply: TargetReply) -> None:
    """Every token that counts is one that its row may draw."""
    assert plan.logit_mask is not None and plan.masked_rows is not None
    masks = dict(zip(plan.masked_rows.tolist(), plan.logit_mask, strict=True))
    counts = plan.num_sampled_rows[plan.num_sampled_rows > 0]
    for first, tokens, accepted in zip(
        (np.cumsum(counts) - counts).tolist(), reply.output_token_ids.tolist(), reply.num_accepted_tokens, strict=True
    ):
        for place, token in enumerate(tokens[: accepted + 1]):
            mask = masks.get(first + place)
            assert mask is None or mask[token // 32] >> (token % 32) & 1


@pytest.mark.parametrize("kind", ["mla31", "mha"])
def test_texts_begin_as_those_of_steps_without_buckets(kind: str) -> None:
    """Greedy. Padding may change how a product is rounded, and a text parts at the first tie that this decides; a wrong
    row, slot or length would part all of them at once."""
    prompts_and_more = 40
    graph, plain = (loop(kind, recorder, KS) for recorder in (graph_recorder(), None))
    lengths = [len(sequence.token_ids) for sequence in plain.sequences]
    texts = [one.run(max(lengths) + prompts_and_more) for one in (graph, plain)]
    shared = []
    for length, left, right in zip(lengths, *texts, strict=True):
        ends = slice(length, length + prompts_and_more)
        shared.append(shared_length(left[ends], right[ends]))
    assert sum(shared) >= len(KS) * prompts_and_more // 3, shared


@pytest.mark.parametrize("kind", ["mla31", "mha"])
def test_float8_caches(kind: str) -> None:
    """Replays equal plain calls, from pools full of NaN; hidden states are near those of bf16 caches, not the same."""
    where = setting(kv_dtype=torch.float8_e4m3fn, kv_scale=0.5)
    ks = [3, 1, 2]
    graph, plain = (loop(kind, recorder, ks, where) for recorder in (graph_recorder(), EagerRecorder()))
    wide = loop(kind, None, ks).step().target_reply.aux.tensor
    for index in range(4):
        step = graph.step()
        assert_equal_replies(step, plain.step())
        assert not step.target_reply.seq_status.any()
        if not index:
            assert wide is not None and step.target_reply.aux.tensor is not None
            error = (step.target_reply.aux.tensor.float() - wide.float()).norm() / wide.float().norm()
            assert 0 < float(error) < 0.2


def test_sampling_parameters_change_between_replays() -> None:
    one, other = (loop("mla31", recorder, [2, 2, 2]) for recorder in (graph_recorder(), EagerRecorder()))
    for temperature, seed in ((0.0, 0), (1.0, 5), (0.7, 2**62 + 1), (0.0, 1), (2.0, 9)):
        for each in (one, other):
            for index, sequence in enumerate(each.sequences):
                sequence.temperature, sequence.seed = temperature, seed + index
        assert_equal_replies(one.step(), other.step())


@pytest.mark.parametrize("kind", ["mla31", "mha"])
def test_tokens_left_on_the_device_are_those_of_the_reply(kind: str) -> None:
    """The same graphs, and the draft's ids by way of the host or not."""
    loops = [
        loop(kind, graph_recorder(), KS, setting(kernels=ACCEPTING), in_table=in_table) for in_table in (False, True)
    ]
    for _ in range(6):
        replies = [one.step().target_reply for one in loops]
        assert replies[0].output_token_ids.tolist() == replies[1].output_token_ids.tolist()
        assert torch.equal(replies[0].aux.tensor, replies[1].aux.tensor)  # type: ignore[arg-type]
    assert sum(map(sum, (s.accepted for s in loops[1].sequences))) > 10


@pytest.mark.parametrize("acts_at_random", [False, True])
@pytest.mark.parametrize("kind", ["mla31", "mha"])
def test_an_overlapped_draft_as_graphs_and_as_plain_calls(kind: str, acts_at_random: bool) -> None:
    """Through the engine, which has no pause between the steps; the text is made of what the draft proposes, also where
    sequences leave the draft and begin again in their middle."""
    requests = [
        GenerateRequest(
            request_id=str(index),
            prompt_token_ids=tuple(range(3 + index, 20 + 9 * index)),
            sampling=SamplingParams(max_tokens=30 + index, temperature=float(index % 2), seed=index, ignore_eos=True),
            num_speculative_tokens=k,
        )
        for index, k in enumerate((3, 0, 2, 1, 3, 2))
    ]
    runs = []
    for recorder in (graph_recorder(), EagerRecorder()):
        pair = runner_pair(setting(kernels=ACCEPTING), kind, recorder, **HOPPER_WIDTHS)
        harness = EngineHarness(*pair, SchedulerSettings(max_num_seqs=6, max_num_batched_tokens=512))
        if acts_at_random:
            harness.core.scheduler.policy = RandomPolicy(5)
        for request in requests:
            harness.add(request)
        harness.run()
        runs.append(harness.outcomes)
    for graph, plain in zip(*runs, strict=True):
        assert graph.token_ids == plain.token_ids
        assert graph.rounds == plain.rounds


def plain_requests(count: int) -> list[GenerateRequest]:
    """Requests without speculation, greedy and not; none ends before its length."""
    return [
        GenerateRequest(
            request_id=str(index),
            prompt_token_ids=tuple(range(3 + index, 20 + 9 * index)),
            sampling=SamplingParams(max_tokens=70 + 9 * index, temperature=index % 2, seed=index, ignore_eos=True),
            num_speculative_tokens=0,
        )
        for index in range(count)
    ]


def test_steps_launched_ahead_draw_what_steps_in_lockstep_do() -> None:
    """The same buckets in the same order, bit for bit, from pools full of NaN: as graphs that wait for the host, as
    graphs that do not, and as plain calls. Blocks of 64 tokens are begun under way."""
    texts = []
    for recorder, async_scheduling in ((graph_recorder(), False), (graph_recorder(), True), (EagerRecorder(), True)):
        target, _ = runner_pair(setting(), "mla31", recorder, **HOPPER_WIDTHS)
        launched = []
        launch = target.launch

        def counted(plan: TargetPlan, launch: Any = launch, launched: list[bool] = launched) -> Any:
            launched.append(bool((plan.num_given == 0).any()))
            return launch(plan)

        target.launch = counted  # type: ignore[method-assign]
        settings = SchedulerSettings(max_num_seqs=6, max_num_batched_tokens=512, async_scheduling=async_scheduling)
        outcomes = generate(target, None, plain_requests(6), settings)
        assert sum(launched) > (100 if async_scheduling else -1)
        texts.append([outcome.token_ids for outcome in outcomes])
    assert texts[0] == texts[1] == texts[2]


@pytest.fixture(scope="module")
def nano_pair() -> tuple[TargetRunner, DraftRunner]:
    """kimi-nano with captured steps of up to 3 draft tokens."""
    target, draft = load_pair(
        nano_settings(kernels="triton", kv_tokens=16384, capture_batch_sizes="1,4,16", max_speculative_tokens=3)
    )
    assert draft is not None
    return target, draft


def test_a_trained_draft_is_accepted_as_much_when_it_overlaps(nano_pair: tuple[TargetRunner, DraftRunner]) -> None:
    """kimi-nano: what is proposed on the way is as good as what is proposed with everything known."""
    requests = [replace(r, num_speculative_tokens=3) for r in nano_requests(16, 120)]
    lengths, texts = [], []
    for async_scheduling in (False, True):
        outcomes = generate(*nano_pair, requests, SchedulerSettings(max_num_seqs=16, async_scheduling=async_scheduling))
        rounds = [accepted for outcome in outcomes for _, accepted in outcome.rounds]
        lengths.append(1 + sum(rounds) / len(rounds))
        texts.append([outcome.token_ids for outcome in outcomes])
    assert lengths[1] == pytest.approx(lengths[0], rel=0.06)
    same = sum(ours == theirs for ours, theirs in zip(*texts, strict=True))
    assert same >= len(requests) // 2, f"{same} of {len(requests)} texts are the same"


@pytest.mark.parametrize("num_sequences", [1, 16])
def test_the_adaptive_policy_chooses_among_captured_steps(
    nano_pair: tuple[TargetRunner, DraftRunner], num_sequences: int
) -> None:
    """kimi-nano: its steps are timed as they are captured. Texts begin as those of a fixed k; they part where a step of
    another number of rows rounds otherwise, after a hundred tokens or so."""
    requests = [replace(r, num_speculative_tokens=3) for r in nano_requests(num_sequences, 240)]
    texts = []
    for policy in (PolicyName.FIXED, PolicyName.ADAPTIVE):
        harness = EngineHarness(*nano_pair, SchedulerSettings(max_num_seqs=16, speculation_policy=policy))
        for request in requests:
            harness.add(request)
        started = time.perf_counter()
        harness.run()
        drafted = Counter(step.num_draft_tokens for outcome in harness.outcomes for step in outcome.steps[1:])
        seconds = time.perf_counter() - started
        logger.info("%s, %d sequences: %.2f s, verifies by k %s", policy.value, num_sequences, seconds, dict(drafted))
        texts.append([outcome.token_ids for outcome in harness.outcomes])
    costs = [runner.measure_costs() for runner in nano_pair]
    assert all(known.is_captured and known.num_seqs[-1] >= 16 for known in costs)
    assert costs[0].step_us[-1][-1] > costs[0].step_us[0][0] > 20
    assert sum(drafted.values()) > 0
    shared = [shared_length(fixed, chosen) / len(fixed) for fixed, chosen in zip(*texts[:2], strict=True)]
    assert sum(shared) > 0.25 * len(requests), shared


def shared_length(left: list[int], right: list[int]) -> int:
    """Tokens that two texts begin with."""
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(left, right, strict=False)))


def in_order(one: SpeculativeLoop, order: list[int]) -> Step:
    """A step of some sequences only, as they stand in `order`."""
    everyone = one.sequences
    one.sequences = [everyone[index] for index in order]
    step = one.step()
    one.sequences = everyone
    return step


@pytest.fixture
def only_fetch_waits(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An error on any wait for the device but the one that reads token ids."""
    from kimi_backend.runners.graphs import static_arrays

    wait = static_arrays.ArrivingWords.wait

    def allowed(self: static_arrays.ArrivingWords) -> object:
        torch.cuda.set_sync_debug_mode("default")
        try:
            return wait(self)
        finally:
            torch.cuda.set_sync_debug_mode("error")

    monkeypatch.setattr(static_arrays.ArrivingWords, "wait", allowed)
    yield
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")
@pytest.mark.parametrize("in_table", [False, True])
def test_a_captured_step_waits_once(in_table: bool, only_fetch_waits: None) -> None:
    one = loop("mla31", graph_recorder(), [3, 1, 2], in_table=in_table)
    torch.cuda.set_sync_debug_mode("default")
    one.step()
    torch.cuda.set_sync_debug_mode("error")
    for _ in range(3):
        one.step()


def test_a_recording_keeps_the_tensors_that_only_its_step_holds() -> None:
    """A graph knows addresses and owns nothing: memory given back would be another tensor's by the next replay."""
    device = torch.device("cuda")
    recorder, out = GraphRecorder(device), torch.zeros(1 << 20, device=device)

    def record() -> Run:
        held_by_the_step = torch.full_like(out, 7.0)

        def step() -> None:
            out.copy_(held_by_the_step)

        return recorder.record(step)

    replay = record()
    others = [torch.full_like(out, -1.0) for _ in range(16)]
    replay()
    torch.cuda.synchronize()
    assert bool((out == 7.0).all()), f"{len(others)} other tensors are where the step's was"
