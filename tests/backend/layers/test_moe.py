"""A layer of experts: for how many rows the shared one runs beside the others."""

import pytest
import torch

from kimi_backend.checkpoint.tensor_source import InMemoryTensors
from kimi_backend.layers.moe import MoeMlp
from kimi_backend.layers.side_stream import Work
from kimi_backend.models.kimi_k25 import target_loader
from kimi_backend.parallel import SingleRank
from kimi_kernels.kernel_set import KernelSet
from support.tiny_checkpoints import random_target
from support.tiny_configs import target_config

CPU = torch.device("cpu")


class Starts:
    """A second stream that counts what is started in it."""

    def __init__(self) -> None:
        self.count = 0

    def start(self, work: Work) -> Work:
        self.count += 1
        return work


@pytest.mark.parametrize(
    ("width", "candidates", "beside"),
    [(288, range(1, 12), [4, 5, 6, 7, 8]), (256, [1, 8, 9, 10, 256, 257], [9, 10, 256])],
    ids=["wide", "narrow"],
)
def test_rows_whose_shared_expert_runs_beside_the_others(
    width: int, candidates: "range | list[int]", beside: list[int]
) -> None:
    config = target_config(moe_intermediate_size=width, num_hidden_layers=2)
    loader = target_loader(
        config, InMemoryTensors(random_target(config)), KernelSet.plain(), SingleRank(), CPU, torch.float32
    )
    layer = MoeMlp(loader.scoped("model.layers.1.mlp"), config)
    found = []
    for rows in candidates:
        starts = layer._side_stream = Starts()  # type: ignore[assignment]
        layer(torch.zeros(rows, config.hidden_size))
        found += [rows] * starts.count
    assert found == beside
