"""The trained demo target with products of single rows, as a CPU takes them, and on tiles: logits differ by rounding,
and a token or a router's choice differs only where its runner-up is closer than that."""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

import kimi_kernels
from kimi_backend.checkpoint.loading import TargetCheckpoint
from kimi_backend.models.kimi_k25 import KimiTarget
from kimi_backend.parallel import SingleRank
from kimi_backend.text.tokenizer import load_tokenizer
from kimi_kernels import KernelSet
from kimi_kernels.linear import plain
from kimi_kernels.sampling.plain import gumbel_rows
from kimi_kernels.synthetic_sets import with_router
from support.target_steps import CPU, TargetSteps

NANO = Path(__file__).parents[3] / "demo" / "kimi-nano"
TEXT = Path(kimi_kernels.__file__).with_name("weights.py")
NUM_TOKENS = 500
# Eight layers of float32 sums, on logits of up to 20: measured 2e-5.
LOGIT_NOISE = 2e-4
# A sigmoid's score moves by at most a quarter of what its logit does.
SCORE_NOISE = 1e-5


@dataclass(frozen=True)
class Run:
    """One kernel set's results for the same tokens."""

    logits: Tensor
    """[T, vocab_size]"""
    choices: list[Tensor]
    """A tensor for each expert layer, [T, num_experts]: whether the expert was chosen."""
    margins: list[Tensor]
    """A tensor for each expert layer, [T]: by how much the last expert chosen leads the first one left out."""


def load(kernels: KernelSet) -> KimiTarget:
    checkpoint = TargetCheckpoint.open(NANO)
    with checkpoint.loading() as tensors:
        return KimiTarget(checkpoint.config, tensors, kernels, SingleRank(), CPU, torch.float32)


def run(kernels: KernelSet, tokens: list[int]) -> Run:
    choices, margins = [], []

    def recording(router_logits: Tensor, bias: Tensor, *, top_k: int, **settings: object) -> tuple[Tensor, Tensor]:
        ids, weights = kernels.route_experts(router_logits, bias, top_k=top_k, **settings)  # type: ignore[arg-type]
        ordered = (router_logits.double().sigmoid() + bias.double()).sort(dim=1, descending=True).values
        margins.append(ordered[:, top_k - 1] - ordered[:, top_k])
        choices.append(torch.zeros(router_logits.shape, dtype=torch.bool).scatter_(1, ids.long(), True))
        return ids, weights

    recorded = with_router(kernels, recording)
    target = load(recorded)
    logits, _ = TargetSteps(target, recorded, [len(tokens)], block_size=64).run(tokens, [len(tokens)])
    return Run(logits, choices, margins)


@pytest.fixture(scope="module")
def tokens() -> list[int]:
    token_ids = load_tokenizer(str(NANO)).encode(TEXT.read_text(encoding="utf-8"))[:NUM_TOKENS]
    assert len(token_ids) == NUM_TOKENS
    return list(token_ids)


@pytest.fixture(scope="module")
def runs(tokens: list[int]) -> tuple[Run, Run]:
    """(On tiles, by rows)."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plain, "pack_half", lambda weight: None)
        patch.setattr(plain, "keeps_rows_aligned", lambda *widths: False)
        on_tiles = run(KernelSet.plain(), tokens)
    return on_tiles, run(KernelSet.plain(), tokens)


def flipped_rows(runs: tuple[Run, Run]) -> Tensor:
    """[T]: whether an expert layer chose otherwise at the row or, seen through attention, at one before it."""
    differs = [(a != b).any(dim=1) for a, b in zip(runs[0].choices, runs[1].choices, strict=True)]
    return torch.stack(differs).any(dim=0).cummax(dim=0).values


def test_a_router_chooses_otherwise_only_at_a_tie(runs: tuple[Run, Run]) -> None:
    is_first = torch.ones(NUM_TOKENS, dtype=torch.bool)
    for mine, other, margin in zip(runs[0].choices, runs[1].choices, runs[0].margins, strict=True):
        differs = (mine != other).any(dim=1) & is_first
        assert (margin[differs] < SCORE_NOISE).all(), margin[differs]
        is_first &= ~differs.cummax(dim=0).values


def test_logits_differ_by_rounding(runs: tuple[Run, Run]) -> None:
    usable = ~flipped_rows(runs)
    assert usable.sum() > NUM_TOKENS // 2, "too few rows before the first tie of a router"
    torch.testing.assert_close(runs[1].logits[usable], runs[0].logits[usable], rtol=0, atol=LOGIT_NOISE)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_token_differs_only_where_the_runner_up_is_inside_the_noise(
    runs: tuple[Run, Run], temperature: float
) -> None:
    usable = ~flipped_rows(runs)
    mine, other = (one.logits[usable].double() for one in runs)
    if temperature:
        noise = gumbel_rows([7] * len(mine), list(range(len(mine))), mine.shape[1])
        mine, other = mine / temperature + noise, other / temperature + noise
    best = mine.topk(2, dim=1)
    rounding = (mine - other).abs().amax(dim=1)
    differs = best.indices[:, 0] != other.argmax(dim=1)
    gap = best.values[:, 0] - best.values[:, 1]
    assert (gap[differs] <= 2 * rounding[differs]).all()
    assert differs.sum() <= 2, "a tie inside float32 rounding is rare"


def test_chunks_and_verifies_give_the_bits_of_the_whole(runs: tuple[Run, Run], tokens: list[int]) -> None:
    """The trained model's weights take the float16 products, which the tiny models' float32 weights do not."""
    kernels = KernelSet.plain()
    target = load(kernels)
    splits = [200, 64, 9, 1, 2, 3, 4, 5, 6, 7, 8, 1, 1, 17, 33]
    splits.append(NUM_TOKENS - sum(splits))
    logits, _ = TargetSteps(target, kernels, [NUM_TOKENS], block_size=16, seed=5).run(tokens, splits)
    assert torch.equal(logits, runs[1].logits)
