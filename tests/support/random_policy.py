"""A speculation policy that changes its mind at random: whatever it does, no token may differ."""

import random

from kimi_backend.spec_decode.controller import SpeculationController


class RandomPolicy:
    """Each sequence leaves the draft and comes back, and k changes, every few rounds."""

    def __init__(self, seed: int, restlessness: float = 0.3) -> None:
        self.num_chosen_tokens = 0
        self.num_begins = self.num_ends = 0
        self._rng = random.Random(seed)
        self._restlessness = restlessness

    def admit(
        self, controller: SpeculationController, running: list[SpeculationController], num_sequences: int
    ) -> None:
        assert num_sequences > len(running)
        self._change(controller)

    def begin_round(self, controllers: list[SpeculationController], num_sequences: int) -> None:
        assert len(controllers) <= num_sequences
        for controller in controllers:
            if self._rng.random() < self._restlessness:
                used = controller.uses_draft
                self._change(controller)
                self.num_begins += controller.uses_draft and not used
                self.num_ends += used and not controller.uses_draft

    def think(self) -> None:
        """It never does."""

    def end_round(self, *, is_pure_decode: bool, draft_s: float, target_s: float) -> None:
        assert draft_s >= 0
        assert target_s > 0

    def _change(self, controller: SpeculationController) -> None:
        controller.uses_draft = self._rng.random() < 0.6
        controller.num_chosen_tokens = self._rng.randint(0, controller.num_speculative_tokens)
