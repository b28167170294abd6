"""Two ranks over gloo compute what one rank computes, from half of the weights each."""

import re
from pathlib import Path

import pytest
import torch

from support.forked_processes import run_ranks
from support.ranks import Outputs, Reads, run_rank, run_single_rank

NUM_RANKS = 2
MAX_RELATIVE_ERROR = 1e-5
HELD_BY_EVERY_RANK = re.compile(
    r".*(norm(\.\d)?\.weight|layernorm\.weight|\bq_a_proj\.weight|kv_a_proj_with_mqa\.weight|mlp\.gate\.weight"
    r"|e_score_correction_bias|q_a_proj\.weight_scale_inv|kv_a_proj_with_mqa\.weight_scale_inv)|d2t|t2d"
)


@pytest.fixture(scope="module")
def one_rank() -> tuple[Outputs, Reads]:
    return run_single_rank()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Outputs, Reads]]:
    folder = tmp_path_factory.mktemp("ranks")
    run_ranks(run_rank, NUM_RANKS, NUM_RANKS, str(folder))
    return [torch.load(Path(folder) / f"{rank}.pt") for rank in range(NUM_RANKS)]


def test_every_rank_returns_what_one_rank_returns(
    one_rank: tuple[Outputs, Reads], ranks: list[tuple[Outputs, Reads]]
) -> None:
    for outputs, _ in ranks:
        assert outputs.keys() == one_rank[0].keys()
        for name, expected in one_rank[0].items():
            if name.endswith("token ids"):
                assert torch.equal(outputs[name], expected), name
                continue
            error = (outputs[name] - expected).abs().max() / expected.abs().max()
            assert error < MAX_RELATIVE_ERROR, f"{name}: {error:.1e}"
    assert all(torch.equal(ranks[0][0][name], ranks[1][0][name]) for name in ranks[0][0])


def test_argmax_over_ranks_is_the_argmax_of_gathered_logits(ranks: list[tuple[Outputs, Reads]]) -> None:
    outputs = ranks[1][0]
    for kind in ("mla", "mla31", "mha"):
        assert torch.equal(outputs[f"{kind} best values"], outputs[f"{kind} logits"].max(dim=1).values)


def test_each_rank_reads_only_its_slices(one_rank: tuple[Outputs, Reads], ranks: list[tuple[Outputs, Reads]]) -> None:
    for model, whole in one_rank[1].items():
        shared = [name for name in whole if HELD_BY_EVERY_RANK.fullmatch(name)]
        assert len(shared) < len(whole)
        for name, size in whole.items():
            read = [reads[model][name] for _, reads in ranks]
            message = f"{model}: {name} has {size} elements, ranks read {read}"
            if name in shared:
                assert read == [size, size], message
            elif name.endswith("scale_inv"):
                # A slice may end inside a block, whose scale both ranks need.
                assert all(size // 2 <= count < size for count in read), message
            else:
                assert read == [size // 2, size // 2], message
