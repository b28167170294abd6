"""Steps with a chunk of a prompt: each as the runner takes it, and with every kernel launched by itself, in turn."""

import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np
import torch

from kimi_backend.runners.step_timing import draft_plan
from kimi_backend.types.plan import AuxHandle, RowPlan, SamplingPlan, TargetPlan
from slice_suite.gpu_time import profile_rounds

NUM_TURNS, STEPS_A_TURN, NUM_PROFILED = 3, 5, 2
NUM_GAPS = 8
"""The longest gaps between kernels that are told; the one around the host's work between two steps is among them."""
KV_BLOCK, PROPOSALS = 64, 8


@dataclass(frozen=True, slots=True)
class PromptStep:
    """A chunk beside sequences that decode."""

    num_rows: int
    """Rows of the whole step."""
    num_decodes: int
    context: int
    """Tokens before the chunk, and of each sequence that decodes."""

    @classmethod
    def parse(cls, text: str) -> "PromptStep":
        """Read 256:16:1024 as 256 rows, of which 16 are of sequences that decode, all behind 1,024 tokens.

        Raises:
            ValueError: other text, or no row is left for the chunk.
        """
        numbers = [int(part) if part.isdecimal() else 0 for part in text.split(":")]
        if len(numbers) != 3 or numbers[0] <= numbers[1]:
            raise ValueError(f"{text}: ROWS:DECODES:CONTEXT is needed, with more rows than sequences that decode")
        return cls(*numbers)

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return self.context + self.num_rows - self.num_decodes

    @property
    def num_tokens(self) -> int:
        """Room for all sequences and what is proposed for them."""
        return (self.num_decodes + 1) * (self.longest + PROPOSALS + KV_BLOCK)

    def rows(self, vocab_size: int, num_blocks: int, block_size: int) -> RowPlan:
        """Random tokens; every sequence has blocks of its own where the pool has as many."""
        query_lens = np.array([1] * self.num_decodes + [self.num_rows - self.num_decodes], np.int32)
        blocks = -(-(self.longest + PROPOSALS) // block_size)
        table = np.arange(len(query_lens) * blocks, dtype=np.int32) % num_blocks
        return RowPlan(
            token_ids=np.random.default_rng(0).integers(0, vocab_size, self.num_rows, np.int32),
            query_lens=query_lens,
            seq_lens=self.context + query_lens,
            block_table=table.reshape(len(query_lens), blocks),
        )


def measure_prompt_step(
    target: Any, draft: Any | None, step: PromptStep, num_proposals: int, num_ranks: int
) -> dict[str, Any]:
    """Milliseconds of the target's step and of the draft's behind it, and how much of that the GPU is busy.

    Args:
        num_ranks: see `measure_case`.
    """
    about = target.describe()
    rows = step.rows(about.vocab_size // num_ranks, about.num_blocks, about.block_size)
    num_seqs = len(rows.query_lens)
    plan = TargetPlan.given(
        rows,
        step_id=1,
        num_sampled_rows=np.ones(num_seqs, np.int32),
        sampling=SamplingPlan.plain(num_seqs, temperature=1.0),
        num_logprobs=None,
        wants_aux=np.full(num_seqs, draft is not None),
    )

    def verify() -> AuxHandle:
        aux: AuxHandle = target.launch(plan).wait().aux
        return aux

    def propose(aux: AuxHandle) -> None:
        if draft is not None:
            draft.launch(draft_plan(rows, num_proposals, aux, in_table=False)).wait()

    found: dict[str, Any] = {"prompt_step": f"{step.num_rows}:{step.num_decodes}:{step.context}"}
    found |= {"num_speculative_tokens": num_proposals}
    found |= {name: {"target_ms": [], "draft_ms": []} for name in WAYS}
    for _ in range(NUM_TURNS):
        for name, way in WAYS.items():
            with way(target, draft):
                propose(verify())
                for _ in range(STEPS_A_TURN):
                    start = perf_counter()
                    aux = verify()
                    middle = perf_counter()
                    propose(aux)
                    found[name]["target_ms"].append(1e3 * (middle - start))
                    found[name]["draft_ms"].append(1e3 * (perf_counter() - middle))
    for name, way in WAYS.items():
        found[name] = {part: round(statistics.median(times), 3) for part, times in found[name].items()}
        if torch.cuda.is_available():
            with way(target, draft):
                found[name] |= _gpu(verify, found[name]["target_ms"])
    return found


def _gpu(run: Callable[[], object], step_ms: float) -> dict[str, Any]:
    """The GPU's part of a target step that takes so long without a profiler."""
    time = profile_rounds(lambda: [run() for _ in range(NUM_PROFILED)], NUM_PROFILED)
    return {
        "gpu_ms": round(time.covered_us / 1e3, 3),
        "gpu_share": round(time.covered_us / 1e3 / step_ms, 3),
        "num_kernels": time.num_kernels,
        "by_kind_us": time.by_kind,
        "idle": time.idle[:NUM_GAPS],
    }


@contextmanager
def _as_it_comes(target: Any, draft: Any | None) -> Iterator[None]:
    """Nothing is changed."""
    yield


@contextmanager
def _eagerly(target: Any, draft: Any | None) -> Iterator[None]:
    """No captured step is found for rows; a draft's proposals have theirs."""
    graphs = [(target._graphs, "find")] + ([(draft._graphs, "extension_bucket")] if draft is not None else [])
    for owner, name in graphs:
        if owner is not None:
            setattr(owner, name, lambda plan: None)
    try:
        yield
    finally:
        for owner, name in graphs:
            if owner is not None:
                delattr(owner, name)


WAYS = {"eager": _eagerly, "captured": _as_it_comes}
