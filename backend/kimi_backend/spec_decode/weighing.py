"""Choices for one batch held against each other: what they emit a second, and how sure that is."""

from dataclasses import dataclass, field
from math import log, sqrt

from kimi_backend.spec_decode.acceptance import AcceptancePool, doubt_of_gain, gains
from kimi_backend.spec_decode.choice import Choice, best_choice, rate, round_s
from kimi_backend.spec_decode.round_costs import CostRatios

DOUBTS = 2.0
"""Another number of draft tokens is worth a visit while so many doubts of its cost could make it the better one."""


@dataclass(slots=True)
class Weighing:
    """What is expected of a batch now. Times are in rounds without a draft."""

    costs: CostRatios
    chances: list[list[float]]
    """[candidates][limit + 1] kept draft tokens a round, by number of draft tokens."""
    num_sequences: int
    """In the batch, those that never draft included."""
    times: list[float] = field(init=False)
    """Of a round with 0, 1, … draft tokens."""

    def __post_init__(self) -> None:
        self.times = self.costs.times

    @property
    def limit(self) -> int:
        """Most draft tokens that any candidate asked for."""
        return max(map(len, self.chances)) - 1

    def rate(self, members: tuple[bool, ...], num_draft_tokens: int) -> float:
        """Tokens a round without a draft's time."""
        return rate(self.times, self.chances, members, num_draft_tokens, self.num_sequences)

    def best(self, may_draft: list[bool], everyone: bool) -> Choice:
        """The fastest choice in which somebody drafts, if anybody may.

        Args:
            everyone: all that may do; else those that pay beside the others.
        """
        members = tuple(may_draft)
        if not everyone:
            chances = [gain if may else [0.0] for gain, may in zip(self.chances, may_draft, strict=True)]
            free = best_choice(self.times, chances, self.num_sequences)
            members = free.members if any(free.members) else members
        if not any(members):
            return Choice(0, members, self.num_sequences)
        rates = [self.rate(members, k) for k in range(1, self.limit + 1)]
        return Choice(1 + rates.index(max(rates)), members, max(rates))

    def log_gains(self, choice: Choice, mine: list[bool], pool: AcceptancePool) -> list[tuple[float, float]]:
        """What some of a choice's members add to it, for 1, 2, … draft tokens, if each is accepted as its kind is on
        average: one sequence's own luck says little of the kind.

        Args:
            mine: which candidates they are.
            pool: what is known of their acceptance.
        Returns:
            Logarithm of tokens a second over those if they did not draft, and one standard error of it.
        """
        others = tuple(m and not own for m, own in zip(choice.members, mine, strict=True))
        num_mine = sum(choice.members) - sum(others)
        without, rates, found = self.rate(others, choice.num_draft_tokens), pool.rates(), []
        mean = {limit: gains(rates, 1.0, limit - 1) for limit in set(map(len, self.chances))}
        chances = [mean[len(own)] if is_mine else own for own, is_mine in zip(self.chances, mine, strict=True)]
        for k in range(1, self.limit + 1):
            with_them = rate(self.times, chances, choice.members, k, self.num_sequences)
            tokens = with_them * round_s(self.times, k, sum(choice.members), self.num_sequences)
            doubt = num_mine * doubt_of_gain(rates, k, pool.num_remembered) / tokens
            found.append((log(with_them / without), sqrt(doubt**2 + self.costs.doubt[k] ** 2)))
        return found

    def most_hopeful(self, members: tuple[bool, ...], num_draft_tokens: int) -> tuple[int, float] | None:
        """(number of draft tokens that may well be better than the one that stands, share of tokens a second that it is
        expected to lose); None where there is none."""
        now, found, most = self.rate(members, num_draft_tokens), None, 0.0
        for k in range(1, self.limit + 1):
            there = self.rate(members, k)
            hope = log(there / now) + DOUBTS * self.costs.doubt_between(k, num_draft_tokens)
            if k != num_draft_tokens and hope > most:
                most, found = hope, (k, max(0.0, 1 - there / now))
        return found
