"""Which sequences draft, and how many tokens: what emits most tokens a second over the whole batch."""

from dataclasses import dataclass

SHARED_PART = 0.6
"""Of what drafting adds to a round, the part that is there for one drafting sequence as for all."""


@dataclass(frozen=True, slots=True)
class Choice:
    """One number of draft tokens, and who drafts."""

    num_draft_tokens: int
    members: tuple[bool, ...]
    """For each candidate."""
    tokens_per_s: float
    """Expected of the whole batch."""


def round_s(times: list[float], num_draft_tokens: int, num_members: int, num_sequences: int) -> float:
    """Seconds of a round in which `num_members` of the sequences draft. times: [k] seconds when all do."""
    if not num_members:
        return times[0]
    return times[0] + (times[num_draft_tokens] - times[0]) * share_of(num_members, num_sequences)


def share_of(num_members: int, num_sequences: int) -> float:
    """Part of what drafting adds to a round that so many of the sequences add."""
    return SHARED_PART + (1 - SHARED_PART) * num_members / num_sequences


def rate(times: list[float], gains: list[list[float]], members: tuple[bool, ...], k: int, num_sequences: int) -> float:
    """Tokens a second of one choice.

    Args:
        gains: [candidates][limit + 1] kept draft tokens a round, by number of draft tokens.
        num_sequences: in the batch, those that never draft included.
    """
    gained = sum(g[min(k, len(g) - 1)] for g, is_member in zip(gains, members, strict=True) if is_member)
    return (num_sequences + gained) / round_s(times, k, sum(members), num_sequences)


def best_choice(times: list[float], gains: list[list[float]], num_sequences: int) -> Choice:
    """Over all numbers of draft tokens; for each, the sequences that gain most, as many as pay."""
    best = Choice(0, (False,) * len(gains), num_sequences / times[0])
    for k in range(1, max(map(len, gains))):
        ranked = sorted(((g[min(k, len(g) - 1)], index) for index, g in enumerate(gains)), reverse=True)
        total, chosen, found = float(num_sequences), set[int](), None
        for count, (gain, index) in enumerate(ranked, 1):
            total += gain
            chosen.add(index)
            value = total / round_s(times, k, count, num_sequences)
            if value > best.tokens_per_s:
                best = Choice(k, (), value)
                found = frozenset(chosen)
        if found is not None:
            best = Choice(k, tuple(index in found for index in range(len(gains))), best.tokens_per_s)
    return best
