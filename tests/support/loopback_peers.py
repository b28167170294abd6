"""Another rank in the same process: every step crosses the wire's format and is run by a `Follower`."""

import pickle
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from kimi_backend.runners.draft_runner import DraftRunner
from kimi_backend.runners.ranks.follower import Follower
from kimi_backend.runners.ranks.messages import Method, Step, shapes_of, unpacked
from kimi_backend.runners.target_runner import TargetRunner
from kimi_backend.types.plan import DraftPlan, TargetPlan


class SharedByRank0:
    """The other rank's group: what it sums with zeros is what rank 0 is about to share."""

    rank, size = 1, 2
    sum_norm = None

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        assert not x.count_nonzero()
        return self.tensors.pop(0).to(x.device, copy=True)

    def all_gather_columns(self, x: torch.Tensor) -> torch.Tensor:
        raise AssertionError("its runners have groups of their own")

    def all_argmax(self, values: torch.Tensor, token_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        raise AssertionError("its runners have groups of their own")


class LoopbackPeers:
    """One peer with runners of its own. Groups of one rank each, so that neither waits for the other."""

    count = 1

    def __init__(self, target: TargetRunner | None, draft: DraftRunner | None) -> None:
        self.have_both = target is not None and draft is not None
        self._rank_0 = SharedByRank0()
        self._follower = Follower(target, draft, self._rank_0)
        self.steps: Counter[str] = Counter()
        """By method."""
        self.num_shared = 0
        """Tensors that only rank 0 had."""
        self.problems: list[Exception] = []
        """Of the other rank, which would have ended; an engine only sees a runner that fails, and goes on without."""

    def run(
        self,
        method: str,
        plan: TargetPlan | DraftPlan,
        aux: torch.Tensor | None = None,
        shared: Sequence[torch.Tensor] = (),
    ) -> AbstractContextManager[None]:
        self.steps[method] += 1
        self.num_shared += len(shared)
        self._rank_0.tensors = list(shared)
        packed = Step(Method(method), plan, aux, shapes_of(shared)).packed()
        step = unpacked(pickle.loads(pickle.dumps(packed)))
        assert isinstance(step, Step)
        try:
            self._follower.run(step)
        except Exception as error:
            self.problems.append(error)
            raise
        return nullcontext()

    def wait_before_next(self, offset: int, value: int) -> None:
        """On a CPU rank 0 has waited."""

    def ask(self, question: str, contents: list[bytes]) -> list[bytes]:
        return [self._follower.answer(question, content) for content in contents]

    def close(self) -> None:
        pass
