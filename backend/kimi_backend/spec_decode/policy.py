"""A policy says who drafts how many tokens next: as the requests asked, or what is fastest (docs/decisions/0017)."""

from enum import Enum
from typing import Protocol

import numpy as np

from kimi_backend.spec_decode.acceptance import AcceptancePool
from kimi_backend.spec_decode.controller import SpeculationController
from kimi_backend.spec_decode.round_times import Round
from kimi_backend.spec_decode.row_choice import Batch
from kimi_backend.spec_decode.step_times import Floats, Ints
from kimi_backend.types.step_costs import StepCosts


class PolicyName(str, Enum):
    """Values of the setting `speculation_policy`."""

    ADAPTIVE = "adaptive"
    """The choice of as many draft tokens as emit most tokens a second, at most what the request asked for."""
    FIXED = "fixed"
    """The choice of what the request asked for, always."""


class SpeculationPolicy(Protocol):
    """Told of every round of the engine; writes `uses_draft` and `num_chosen_tokens` of the controllers.

    The emitted tokens do not depend on it (docs/sampling.md), only the time that they take.
    """

    @property
    def num_chosen_tokens(self) -> int:
        """Most draft tokens that it now lets a sequence propose."""
        ...

    @property
    def step_costs(self) -> dict[str, StepCosts]:
        """`target`, `draft` -> the costs that it chooses by."""
        ...

    def admit(
        self,
        controller: SpeculationController,
        running: list[SpeculationController],
        num_sequences: int,
        num_context_tokens: int,
    ) -> None:
        """A sequence is about to start, or to start again, without any KV of its own.

        Args:
            running: those of the running sequences that want to speculate.
            num_sequences: how many sequences are expected to run with it.
            num_context_tokens: of all that run, and of this one.
        """
        ...

    def begin_round(
        self, controllers: list[SpeculationController], num_sequences: int, num_context_tokens: int
    ) -> None:
        """Choose for the round that begins now.

        Args:
            controllers: of the running sequences that want to speculate, while there is a draft.
            num_sequences: all that run.
            num_context_tokens: of all that run.
        """
        ...

    def prepare_round(
        self, controllers: list[SpeculationController], num_sequences: int, num_context_tokens: int
    ) -> None:
        """Prepare, while a step is on its way, for what `begin_round` will be asked if nobody comes or goes meanwhile.

        Nothing of the controllers changes: the step that is on its way was planned with them.
        """
        ...

    def choose_looked_up(self, likely: Floats, batch: Batch) -> Ints:
        """[C] how many of the tokens that the host proposes for some sequences the next verify checks.

        Args:
            likely: [C, MAX_SPECULATIVE_TOKENS] how likely each is kept, 0 where there is none.
        """
        ...

    def end_round(self, done: Round) -> None:
        """A round of decode rows alone has ended well."""
        ...


class FixedPolicy:
    """Each sequence drafts what it asked for."""

    def __init__(self) -> None:
        self.num_chosen_tokens = 0
        self.step_costs: dict[str, StepCosts] = {}
        self._pools = {kind: AcceptancePool() for kind in range(3)}

    def admit(
        self,
        controller: SpeculationController,
        running: list[SpeculationController],
        num_sequences: int,
        num_context_tokens: int,
    ) -> None:
        """Nothing to decide; what is counted tells a draft's worth from a lookup's."""
        controller.pool = self._pools[controller.kind]

    def begin_round(
        self, controllers: list[SpeculationController], num_sequences: int, num_context_tokens: int
    ) -> None:
        self.num_chosen_tokens = max((c.num_speculative_tokens for c in controllers), default=0)

    def prepare_round(
        self, controllers: list[SpeculationController], num_sequences: int, num_context_tokens: int
    ) -> None:
        """Nothing to choose."""

    def choose_looked_up(self, likely: Floats, batch: Batch) -> Ints:
        """All."""
        counts: Ints = np.count_nonzero(likely, axis=1)
        return counts

    def end_round(self, done: Round) -> None:
        """Nothing to learn."""


def policy_shares(histogram: list[int]) -> str:
    """Tell the shares of verifies by k: `12 %, 0 %, 88 %`, as far as the largest k that was used."""
    largest = max((k for k, count in enumerate(histogram) if count), default=0)
    total = max(sum(histogram), 1)
    return ", ".join(f"{count / total:.0%}" for count in histogram[: largest + 1])
