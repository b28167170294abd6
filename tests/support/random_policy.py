"""A speculation policy that changes its mind at random: whatever it does, no token may differ."""

import random

import numpy as np

from kimi_backend.spec_decode.controller import SpeculationController
from kimi_backend.spec_decode.round_times import Round
from kimi_backend.spec_decode.row_choice import Batch
from kimi_backend.spec_decode.step_times import Floats, Ints
from kimi_backend.types.step_costs import StepCosts


class RandomPolicy:
    """Each sequence leaves the draft and comes back, and k changes, every few rounds."""

    def __init__(self, seed: int, restlessness: float = 0.3) -> None:
        self.num_chosen_tokens = 0
        self.step_costs: dict[str, StepCosts] = {}
        self.num_begins = self.num_ends = 0
        self._rng = random.Random(seed)
        self._restlessness = restlessness

    def admit(
        self,
        controller: SpeculationController,
        running: list[SpeculationController],
        num_sequences: int,
        num_context_tokens: int,
    ) -> None:
        assert num_context_tokens > len(running) < num_sequences
        self._change(controller)

    def begin_round(
        self, controllers: list[SpeculationController], num_sequences: int, num_context_tokens: int
    ) -> None:
        assert num_context_tokens >= num_sequences >= len(controllers)
        for controller in controllers:
            if self._rng.random() < self._restlessness:
                used = controller.uses_draft
                self._change(controller)
                self.num_begins += controller.uses_draft and not used
                self.num_ends += used and not controller.uses_draft

    def prepare_round(
        self, controllers: list[SpeculationController], num_sequences: int, num_context_tokens: int
    ) -> None:
        assert num_context_tokens >= num_sequences >= len(controllers)

    def choose_looked_up(self, likely: Floats, batch: Batch) -> Ints:
        assert len(likely) <= batch.num_sequences
        most = np.count_nonzero(likely, axis=1)
        return np.array([self._rng.randint(0, count) for count in most.tolist()], np.int64)

    def end_round(self, done: Round) -> None:
        assert done.total_s >= done.draft_wait_s >= done.draft_s >= 0
        assert done.target.num_rows >= done.target.num_seqs

    def _change(self, controller: SpeculationController) -> None:
        controller.uses_draft = self._rng.random() < 0.6
        controller.num_chosen_tokens = self._rng.randint(0, controller.num_speculative_tokens)
