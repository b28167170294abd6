"""Another rank in the same process: every step crosses the wire's format and is run by a `TensorParallelWorker`."""

import pickle
from collections import Counter
from contextlib import AbstractContextManager, nullcontext

import torch

from kimi_backend.rank_worker.tensor_parallel_worker import TensorParallelWorker
from kimi_backend.runners.draft_runner import DraftRunner
from kimi_backend.runners.ranks.messages import Step, unpacked
from kimi_backend.runners.target_runner import TargetRunner
from kimi_backend.types.plan import DraftPlan, TargetPlan


class LoopbackWorkers:
    """One worker with runners of its own. Groups of one rank each, so that neither waits for the other: what ranks of a
    split table share in a sum is copied before the step."""

    count = 1

    def __init__(self, target: TargetRunner | None, draft: DraftRunner | None) -> None:
        self._worker = TensorParallelWorker(target, draft)
        self._runners = target, draft
        self.rank_0: TargetRunner | DraftRunner | None = None
        """The runner whose half of a split table is shared."""
        self.steps: Counter[str] = Counter()
        """Steps by kind: verify, draft, and those whose tokens only the token table has: behind, overlapped."""
        self.problems: list[Exception] = []
        """Failures of the other rank, which would have ended; an engine only sees a runner that fails."""

    def run(self, plan: TargetPlan | DraftPlan, aux: torch.Tensor | None = None) -> AbstractContextManager[None]:
        self.steps[_kind(plan)] += 1
        self._share()
        step = unpacked(pickle.loads(pickle.dumps(Step(plan, aux).packed())))
        assert isinstance(step, Step)
        try:
            self._worker.run(step)
        except Exception as error:
            self.problems.append(error)
            raise
        return nullcontext()

    def _share(self) -> None:
        ours = None if self.rank_0 is None else self.rank_0.table
        for runner in self._runners:
            if ours is not None and runner is not None and runner.table is not None:
                (runner.table.proposed if isinstance(runner, TargetRunner) else runner.table.drawn).copy_(
                    ours.proposed if isinstance(runner, TargetRunner) else ours.drawn
                )

    def wait_before_next(self, offset: int, value: int) -> None:
        """Nothing is to do: rank 0 has waited on a CPU."""

    def ask(self, question: str, contents: list[bytes]) -> list[bytes]:
        return [self._worker.answer(question, content) for content in contents]

    def close(self) -> None:
        pass


def _kind(plan: TargetPlan | DraftPlan) -> str:
    if isinstance(plan, TargetPlan):
        return "behind" if (plan.num_given == 0).any() else "verify"
    return "overlapped" if plan.num_drawn.any() else "draft"
