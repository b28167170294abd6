"""The same text twice through the target: a row at a time, and as verify windows.

What differs between the two is what speculation can change. The text of the first pass is fed to the second whatever
that one draws, so that every position is compared and one difference does not make the rest of its text another.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from exactness_suite.recording import Decisions, Recorder
from kimi_backend.checkpoint.loading import TargetCheckpoint
from kimi_backend.models.kimi_k25 import KimiTarget
from kimi_backend.parallel import SingleRank
from kimi_backend.runners.kv_pool import KvPool
from kimi_backend.runners.plan_checks import RunnerLimits
from kimi_backend.runners.target_runner import TargetRunner
from kimi_backend.types.plan import RowPlan, SamplingPlan, TargetPlan
from kimi_kernels.kernel_set import KernelSet
from steady_plans import BLOCK_SIZE

Prompt = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Pass:
    """Decisions about [N, num_tokens] new tokens of N prompts, by one way of cutting rows."""

    token_ids: npt.NDArray[np.int64]
    score_gaps: npt.NDArray[np.float64]
    router_gaps: npt.NDArray[np.float64]


class ForcedTarget:
    """A target on the GPU whose decisions are recorded, step by step and without CUDA graphs."""

    def __init__(self, checkpoint: Path, kernels: KernelSet, dtype: torch.dtype, device: str, longest: int) -> None:
        """longest: tokens of the longest sequence."""
        opened = TargetCheckpoint.open(str(checkpoint))
        self._recorder = Recorder(kernels)
        where = torch.device(device)
        with opened.loading() as tensors:
            model = KimiTarget(opened.config, tensors, self._recorder.kernels, SingleRank(), where, dtype)
        self._blocks_each = -(-longest // BLOCK_SIZE)
        self._model, self._dtype, self._device = model, dtype, where
        self._limits = RunnerLimits(max_num_batched_tokens=32_768, max_num_seqs=256, max_model_len=longest)

    def run(
        self, prompts: Sequence[Prompt], temperature: float, num_tokens: int, window: int, text: Pass | None
    ) -> Pass:
        """All prompts together.

        Args:
            window: rows of a sequence in a step after the prompt.
            text: whose tokens are fed; None feeds what was drawn, a row at a time.
        """
        pool = KvPool.allocate(
            self._model.kv_pool_shape, len(prompts) * self._blocks_each, BLOCK_SIZE, self._dtype, self._device
        )
        runner = TargetRunner(self._model, self._recorder.kernels, pool, self._limits)
        out = Pass(*(np.zeros((len(prompts), num_tokens), kind) for kind in (np.int64, np.float64, np.float64)))
        self._prefill(runner, prompts, temperature, out)
        lengths = np.array([len(prompt) for prompt in prompts])
        fed = out.token_ids if text is None else text.token_ids
        for first in range(1, num_tokens, window):
            rows = min(window, num_tokens - first)
            # Row i holds token first - 1 + i and draws token first + i.
            tokens = fed[:, first - 1 : first - 1 + rows]
            self._step(runner, list(tokens), lengths + first - 1 + rows, temperature, rows)
            self._keep(out, self._recorder.take(), first, rows)
        return out

    def _prefill(self, runner: TargetRunner, prompts: Sequence[Prompt], temperature: float, out: Pass) -> None:
        """One prompt a step, so that it is cut alike in every pass; its last row draws the first token."""
        for index, prompt in enumerate(prompts):
            self._step(runner, [np.array(prompt)], np.array([len(prompt)]), temperature, 1, first_sequence=index)
            decisions = self._recorder.take()
            out.token_ids[index, 0] = decisions.token_ids[0]
            out.score_gaps[index, 0] = decisions.score_gaps[0]
            out.router_gaps[index, 0] = decisions.router_gaps[-1]

    def _keep(self, out: Pass, decisions: Decisions, first: int, rows: int) -> None:
        columns = slice(first, first + rows)
        shape = (len(out.token_ids), rows)
        out.token_ids[:, columns] = decisions.token_ids.numpy().reshape(shape)
        out.score_gaps[:, columns] = decisions.score_gaps.numpy().reshape(shape)
        out.router_gaps[:, columns] = decisions.router_gaps.numpy().reshape(shape)

    def _step(
        self,
        runner: TargetRunner,
        tokens: list[npt.NDArray[np.int64]],
        seq_lens: npt.NDArray[np.int64],
        temperature: float,
        num_sampled: int,
        first_sequence: int = 0,
    ) -> None:
        """Sequence i has its own blocks, and seed i."""
        count = len(tokens)
        owners = first_sequence + np.arange(count)
        table = owners[:, None] * self._blocks_each + np.arange(self._blocks_each)
        plan = TargetPlan.given(
            step_id=1,
            rows=RowPlan(
                token_ids=np.concatenate(tokens).astype(np.int32),
                query_lens=np.array([len(t) for t in tokens], np.int32),
                seq_lens=seq_lens.astype(np.int32),
                block_table=table.astype(np.int32),
            ),
            num_sampled_rows=np.full(count, num_sampled, np.int32),
            sampling=SamplingPlan.plain(count, temperature=temperature, seed=owners),
            num_logprobs=None,
            wants_aux=np.zeros(count, np.bool_),
        )
        self._recorder.forget()
        runner.launch(plan).wait()
