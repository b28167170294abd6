"""A step waits for a GPU once, at its end; and the plain kernels give there what they give on a
CPU, so that every tensor is where it belongs."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from kimi_backend.checkpoint.tensor_source import InMemoryTensors
from kimi_backend.models.eagle3_draft import Eagle3Draft
from kimi_backend.models.eagle3_mha import Eagle3MhaDraft
from kimi_backend.models.eagle3_mla import Eagle3MlaDraft
from kimi_backend.models.kimi_k25 import KimiTarget
from kimi_backend.parallel import SingleRank
from kimi_backend.runners import draft_runner, host_transfer, target_runner
from kimi_backend.runners.draft_runner import DraftRunner
from kimi_backend.runners.kv_pool import KvPool
from kimi_backend.runners.target_runner import TargetRunner
from kimi_backend.types.plan import RowPlan, SamplingPlan, TargetPlan
from kimi_backend.types.scoring import ScoringPlan, TokenScores
from kimi_kernels.kernel_set import KernelSet
from support.device_kernels import device_kernel_set
from support.speculative_loop import SpeculativeLoop
from support.tiny_checkpoints import random_draft, random_target
from support.tiny_configs import draft_config, target_config
from support.tiny_runners import BLOCK_SIZE, LIMITS, NUM_BLOCKS

pytestmark = pytest.mark.gpu

PROMPTS = [[3, 5, 7, 2, 9], [1] * 20, [4, 8]]
DRAFTS: list[tuple[str, type[Eagle3Draft], dict[str, Any]]] = [
    ("mla31", Eagle3MlaDraft, {}),
    ("mha", Eagle3MhaDraft, {"draft_vocab_size": 48}),
]


def runners(
    kernels: KernelSet, device: torch.device, dtype: torch.dtype, draft: tuple[str, type[Eagle3Draft], dict[str, Any]]
) -> tuple[TargetRunner, DraftRunner]:
    config = target_config()
    model = KimiTarget(config, InMemoryTensors(random_target(config)), kernels, SingleRank(), device, dtype)
    pool = KvPool.allocate(model.kv_pool_shape, NUM_BLOCKS, BLOCK_SIZE, dtype, device)
    kind, draft_class, fields = draft
    settings = draft_config(kind, config, **fields)
    source = InMemoryTensors(random_draft(settings))
    draft_model = draft_class(settings, source, kernels, SingleRank(), device, dtype)  # type: ignore[arg-type]
    draft_pool = KvPool.allocate(draft_model.kv_pool_shape, NUM_BLOCKS, BLOCK_SIZE, dtype, device)
    return (
        TargetRunner(model, kernels, pool, LIMITS, settings.aux_layer_ids),
        DraftRunner(draft_model, kernels, draft_pool, LIMITS, dtype),
    )


@pytest.fixture
def waits_only_at_the_end(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An error on any wait for the device but the copy of the results."""

    def to_host(tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
        torch.cuda.set_sync_debug_mode("default")
        try:
            return host_transfer.to_host(tensors)
        finally:
            torch.cuda.set_sync_debug_mode("error")

    monkeypatch.setattr(target_runner, "to_host", to_host)
    monkeypatch.setattr(draft_runner, "to_host", to_host)
    yield
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")
@pytest.mark.parametrize("draft", DRAFTS, ids=["mla", "mha"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_step_waits_for_the_device_once(
    draft: tuple[str, type[Eagle3Draft], dict[str, Any]], temperature: float, waits_only_at_the_end: None
) -> None:
    target, drafting = runners(device_kernel_set(), torch.device("cuda"), torch.bfloat16, draft)
    loop = SpeculativeLoop(target, drafting, PROMPTS, [3, 1, 7], temperature=temperature)
    torch.cuda.set_sync_debug_mode("error")
    for _ in range(4):
        loop.step(12)


def score(target: TargetRunner) -> TokenScores:
    """The scores of 100 tokens of a prompt, more than have their logits at once."""
    token_ids = np.arange(100, dtype=np.int32) * 7 % 90
    rows = RowPlan(
        token_ids=token_ids,
        query_lens=np.array([100], np.int32),
        seq_lens=np.array([100], np.int32),
        block_table=np.arange(7, dtype=np.int32)[None],
    )
    plan = TargetPlan.given(
        step_id=1,
        rows=rows,
        num_sampled_rows=np.ones(1, np.int32),
        sampling=SamplingPlan.plain(1),
        num_logprobs=None,
        wants_aux=np.array([False]),
        scoring=ScoringPlan(rows=np.arange(99, dtype=np.int32), token_ids=token_ids[1:], num_top=5),
    )
    scores = target.launch(plan).wait().scores
    assert scores is not None
    return scores


@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")
def test_a_prompts_scores_are_those_of_a_cpu_and_wait_for_nothing(waits_only_at_the_end: None) -> None:
    plain, _ = runners(device_kernel_set(), torch.device("cpu"), torch.float32, DRAFTS[0])
    target, _ = runners(device_kernel_set(), torch.device("cuda"), torch.bfloat16, DRAFTS[0])
    expected = score(plain)
    score(target)  # compiles
    torch.cuda.set_sync_debug_mode("error")
    found = score(target)
    assert np.abs(found.logprobs - expected.logprobs).mean() < 0.04
    assert np.abs(found.top_logprobs - expected.top_logprobs).mean() < 0.04
    assert (found.top_ids[:, 0] == expected.top_ids[:, 0]).mean() > 0.9


@pytest.mark.parametrize("draft", DRAFTS, ids=["mla", "mha"])
def test_the_reference_kernels_give_the_same_text_as_on_a_cpu(
    draft: tuple[str, type[Eagle3Draft], dict[str, Any]],
) -> None:
    """Greedy; a tiny random model's logits are far apart, so rounding does not change a token."""
    texts = []
    for device in ("cpu", "cuda"):
        target, drafting = runners(KernelSet.plain(), torch.device(device), torch.float32, draft)
        texts.append(SpeculativeLoop(target, drafting, PROMPTS, [3, 1, 7]).run(30, chunk_size=12))
        assert target.describe().device == (device if device == "cpu" else drafting.describe().device)
    assert texts[0] == texts[1]
