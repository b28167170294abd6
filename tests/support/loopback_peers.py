"""Another rank in the same process: every step crosses the wire's format and is run by a `Follower`."""

import pickle
from collections import Counter
from contextlib import AbstractContextManager, nullcontext

import torch

from kimi_backend.runners.draft_runner import DraftRunner
from kimi_backend.runners.ranks.follower import Follower
from kimi_backend.runners.ranks.messages import Method, Step, unpacked
from kimi_backend.runners.target_runner import TargetRunner
from kimi_backend.types.plan import DraftPlan, TargetPlan


class LoopbackPeers:
    """One peer with runners of its own. Groups of one rank each, so that neither waits for the other."""

    count = 1

    def __init__(self, target: TargetRunner | None, draft: DraftRunner | None) -> None:
        self._follower = Follower(target, draft)
        self.steps: Counter[str] = Counter()
        """By method."""

    def run(
        self, method: str, plan: TargetPlan | DraftPlan, aux: torch.Tensor | None = None
    ) -> AbstractContextManager[None]:
        self.steps[method] += 1
        step = unpacked(pickle.loads(pickle.dumps(Step(Method(method), plan, aux).packed())))
        assert isinstance(step, Step)
        self._follower.run(step)
        return nullcontext()

    def ask(self, question: str, contents: list[bytes]) -> list[bytes]:
        return [self._follower.answer(question, content) for content in contents]

    def close(self) -> None:
        pass
