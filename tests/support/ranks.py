"""The work of tensor-parallel ranks in processes of their own, over gloo: models, and joining with its collectives."""

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from kimi_backend.config.draft_config import DraftOverrides
from kimi_backend.models.eagle3_draft import Eagle3Draft
from kimi_backend.models.eagle3_mha import Eagle3MhaDraft
from kimi_backend.models.eagle3_mla import Eagle3MlaDraft
from kimi_backend.models.kimi_k25 import KimiTarget
from kimi_backend.parallel import DistributedRanks, SingleRank, TensorParallelGroup
from kimi_backend.runners.draft_runner import DraftRunner
from kimi_backend.runners.kv_pool import KvPool
from kimi_backend.runners.plan_checks import RunnerLimits
from kimi_backend.runners.ranks.process_group import join_ranks, leave
from kimi_backend.runners.target_runner import TargetRunner
from kimi_kernels.kernel_set import KernelSet
from support.counting_source import CountingTensors
from support.markov_models import markov_draft, markov_draft_config, markov_target
from support.paged_sequences import PagedSequences
from support.speculative_loop import SpeculativeLoop
from support.tiny_checkpoints import random_draft, random_target, with_biases
from support.tiny_configs import draft_config, target_config

AUX_LAYER_IDS = (1, 2, 3)
DRAFT_KINDS = ("mla", "mla31", "mha")
NUM_TOKENS = 20
CPU = torch.device("cpu")

Outputs = dict[str, torch.Tensor]
Reads = dict[str, dict[str, int]]


def run_models(group: TensorParallelGroup) -> tuple[Outputs, Reads]:
    """Outputs of targets in every weight format and of every draft; elements that this rank read of each tensor."""
    outputs, reads = {}, {}
    for quantization in ("none", "int4", "fp8"):
        config = target_config(quantization, num_hidden_layers=3, moe_intermediate_size=64)
        source = CountingTensors(random_target(config))
        target = KimiTarget(config, source, KernelSet.plain(), group, CPU, torch.float32)
        hidden, aux = _step_target(target)
        assert aux is not None
        outputs |= {f"{quantization} logits": target.compute_logits(hidden), f"{quantization} aux": aux}
        reads[quantization] = dict(source.elements_read)
    for kind in DRAFT_KINDS:
        outputs |= _run_draft(kind, group, outputs["none aux"], reads)
    outputs |= _run_draft("mha", group, outputs["none aux"], {}, "biased mha", num_hidden_layers=2)
    outputs |= _run_draft("mla31", group, outputs["none aux"], {}, "biased mla31", num_hidden_layers=2)
    return outputs | _run_speculation(group), reads


def run_rank(rank: int, size: int, folder: str) -> None:
    """A rank's process: writes what `run_models` returns to `folder/rank.pt`."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=size)
    assert dist.group.WORLD is not None
    torch.save(run_models(DistributedRanks(dist.group.WORLD)), Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()


def run_single_rank() -> tuple[Outputs, Reads]:
    return run_models(SingleRank())


def _run_speculation(group: TensorParallelGroup) -> Outputs:
    """Both runners in a loop; every rank makes the same plans, since every rank gets the same replies."""
    kernels, config = KernelSet.plain(), target_config(num_hidden_layers=3)
    target = KimiTarget(config, CountingTensors(markov_target(config)), kernels, group, CPU, torch.float32)
    settings = markov_draft_config(config, DraftOverrides(aux_layer_ids=AUX_LAYER_IDS))
    tensors = CountingTensors(markov_draft(settings, markov_target(config), 0.3))
    draft = Eagle3MhaDraft(settings, tensors, kernels, group, CPU, torch.float32)
    pools = [KvPool.allocate(model.kv_pool_shape, 8, 16, torch.float32, CPU) for model in (target, draft)]
    limits = RunnerLimits(max_num_batched_tokens=64, max_num_seqs=2, max_model_len=64)
    loop = SpeculativeLoop(
        TargetRunner(target, kernels, pools[0], limits, AUX_LAYER_IDS),
        DraftRunner(draft, kernels, pools[1], limits, torch.float32),
        [[5, 6, 7], [8, 9]],
        3,
        temperature=0.6,
    )
    tokens = loop.run(30)
    accepted = [count for sequence in loop.sequences for count in sequence.accepted]
    return {"text token ids": torch.tensor(tokens), "accepted token ids": torch.tensor(accepted)}


def _tokens() -> list[int]:
    return torch.randint(0, 96, (NUM_TOKENS,), generator=torch.Generator().manual_seed(0)).tolist()


def _step_target(target: KimiTarget) -> tuple[torch.Tensor, torch.Tensor | None]:
    sequences = PagedSequences([NUM_TOKENS])
    cache = sequences.cache(target.kv_pool_shape(sequences.num_blocks, sequences.block_size))
    rows = sequences.rows([(0, _tokens())])
    metadata = sequences.metadata(rows, KernelSet.plain(), target.num_heads)
    return target.forward(torch.from_numpy(rows.token_ids), metadata, cache, aux_layer_ids=AUX_LAYER_IDS)


def _run_draft(
    kind: str, group: TensorParallelGroup, aux: torch.Tensor, reads: Reads, biased: str = "", **fields: Any
) -> Outputs:
    """biased: what a draft with biases is called."""
    target = target_config(num_hidden_layers=3)
    config = draft_config(kind, target, DraftOverrides(aux_layer_ids=AUX_LAYER_IDS), draft_vocab_size=48, **fields)
    source = CountingTensors(with_biases(random_draft(config)) if biased else random_draft(config))
    draft_class: type[Eagle3Draft] = Eagle3MhaDraft if kind == "mha" else Eagle3MlaDraft
    draft = draft_class(config, source, KernelSet.plain(), group, CPU, torch.float32)
    sequences = PagedSequences([NUM_TOKENS])
    cache = sequences.cache(draft.kv_pool_shape(sequences.num_blocks, sequences.block_size))
    rows = sequences.rows([(0, _tokens())])
    metadata = sequences.metadata(rows, KernelSet.plain(), draft.num_mla_heads)
    normed, feedback = draft.forward(torch.from_numpy(rows.token_ids), draft.combine_aux(aux), metadata, cache)
    values, token_ids = draft.argmax(normed)
    reads[kind] = dict(source.elements_read)
    kind = biased or kind
    names = ("logits", "feedback", "best values", "best token ids")
    results = (draft.compute_logits(normed), feedback, values, token_ids)
    return {f"{kind} {name}": result for name, result in zip(names, results, strict=True)}


def run_on_a_cpu(rank: int, size: int, addresses: list[str]) -> None:
    """Join at each address in turn; all values are checked on every rank against what all ranks are known to hold."""
    torch.set_num_threads(1)
    for address in addresses:
        group = join_ranks(rank, size, address, CPU)
        assert (group.rank, group.size) == (rank, size)
        check_collectives(group, CPU)
        assert listening_addresses() <= {"0100007F"}, "somebody outside of this host could connect"
        leave(group)
        leave(group)


def listening_addresses() -> set[str]:
    """The addresses at which this process listens, as /proc/net/tcp has them: 0100007F is 127.0.0.1, 00000000 any."""
    sockets = {os.readlink(entry.path) for entry in os.scandir("/proc/self/fd") if os.path.islink(entry.path)}
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in sockets:
                found.add(fields[1].split(":")[0])
    return found


def check_collectives(group: TensorParallelGroup, device: torch.device) -> None:
    """Check them on three ranks or two."""
    for dtype in (torch.float32, torch.bfloat16):
        summed = group.all_reduce(torch.full((4, 3), float(group.rank + 1), dtype=dtype, device=device))
        total = float(sum(range(1, group.size + 1)))
        assert torch.equal(summed, torch.full((4, 3), total, dtype=dtype, device=device))
        _check_gather(group, dtype, device)
    _check_argmax(group, device)


def _check_gather(group: TensorParallelGroup, dtype: torch.dtype, device: torch.device) -> None:
    parts = [torch.arange(10, dtype=dtype, device=device).view(2, 5) + 10 * rank for rank in range(group.size)]
    gathered = group.all_gather_columns(parts[group.rank])
    assert gathered.dtype == dtype
    assert torch.equal(gathered, torch.cat(parts, dim=1))


def _check_argmax(group: TensorParallelGroup, device: torch.device) -> None:
    """Columns: a clear best, equals of which the lowest id counts, infinities, a NaN on one rank."""
    nan, inf = float("nan"), float("inf")
    values = torch.tensor([[1, 5, -inf, 1], [2, 5, -inf, nan], [0.5, 4, -inf, 3]], device=device)
    token_ids = torch.tensor([[7, 9, 5, 1], [163_839, 8, 4, 2], [3, 1, 6, 3]], device=device)
    best, best_ids = group.all_argmax(values[group.rank], token_ids[group.rank])
    assert best.dtype == torch.float32
    assert best_ids.dtype == torch.int64
    expected = torch.tensor([2, 5, -inf, nan], device=device)
    torch.testing.assert_close(best, expected, rtol=0, atol=0, equal_nan=True)
    assert best_ids[:3].tolist() == [163_839, 8, 4]
