"""Replies of requests, whoever served them, as cells of a table; and both proposers together against either alone."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from statistics import median
from typing import Any

from kimi_backend.types.request import SpeculationStats
from serving_suite.policy_rows import against_best, verdict

PROPOSERS = ("none", "eagle3", "lookup", "lookup+eagle3")
EDIT_BAR = 1.3
"""Times EAGLE3's acceptance length that both must have where a greedy text repeats what its prompt holds."""


@dataclass(frozen=True, slots=True)
class Reply:
    """A request's output and the counts of its rounds."""

    token_ids: tuple[int, ...]
    rounds: SpeculationStats | None
    by_proposer: dict[str, SpeculationStats]
    num_verifies: int
    """Those without draft tokens too; the step that drew the first token is none."""


Send = Callable[[Sequence[dict[str, Any]], int], tuple[list[Reply], float]]
"""Requests' fields, and how many may run at once -> the replies in the requests' order, output tokens a second."""


@dataclass(slots=True)
class Turns:
    """A proposer's turns over the same requests."""

    name: str
    rates: list[float] = field(default_factory=list)
    """Output tokens a second, one entry a turn."""
    replies: list[list[Reply]] = field(default_factory=list)

    @property
    def texts(self) -> list[list[tuple[int, ...]]]:
        """The texts of each turn."""
        return [[reply.token_ids for reply in replies] for replies in self.replies]


def cells_of(turns: Sequence[Turns]) -> list[dict[str, Any]]:
    """One cell a proposer, over all its turns; texts are compared with the first proposer's first."""
    expected = turns[0].texts[0]
    return [
        {
            "proposer": each.name,
            "num_prompts": len(expected),
            "tokens_per_s": round(median(each.rates), 1),
            "turns": [round(rate, 1) for rate in each.rates],
            **_counts([reply for replies in each.replies for reply in replies]),
            "texts_equal": all(texts == expected for texts in each.texts),
        }
        for each in turns
    ]


def _counts(replies: Sequence[Reply]) -> dict[str, Any]:
    names = sorted({name for reply in replies for name in reply.by_proposer})
    num_tokens, num_verifies = sum(len(r.token_ids) - 1 for r in replies), sum(r.num_verifies for r in replies)
    by_proposer = {name: [reply.by_proposer.get(name) for reply in replies] for name in names}
    return {
        "tokens_a_verify": round(num_tokens / max(num_verifies, 1), 3),
        "rounds": acceptance(reply.rounds for reply in replies),
        "by_proposer": {name: acceptance(found) for name, found in by_proposer.items()},
    }


def acceptance(found: Iterable[SpeculationStats | None]) -> dict[str, Any] | None:
    """The rounds of all together, each position by the rounds that proposed it; None where there was none."""
    stats = [each for each in found if each is not None]
    if not stats:
        return None
    all_rounds = SpeculationStats(
        num_spec_steps=sum(each.num_spec_steps for each in stats),
        num_draft_tokens=sum(each.num_draft_tokens for each in stats),
        num_accepted_draft_tokens=sum(each.num_accepted_draft_tokens for each in stats),
        drafted_per_position=_added(each.drafted_per_position for each in stats),
        accepted_per_position=_added(each.accepted_per_position for each in stats),
    )
    return {
        "rounds": all_rounds.num_spec_steps,
        "acceptance_length": _rounded(all_rounds.mean_acceptance_length),
        "acceptance_rate": _rounded(all_rounds.draft_acceptance_rate),
        "acceptance_per_position": [_rounded(share) for share in all_rounds.acceptance_per_position],
    }


def _added(counts: Iterable[Sequence[int]]) -> tuple[int, ...]:
    return tuple(sum(of_position) for of_position in zip_longest(*counts, fillvalue=0))


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


def comparison(turns: Sequence[Turns], cells: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Both proposers together against the better one alone, by turn, and their acceptance length by EAGLE3's."""
    _, eagle3, lookup, both = turns
    lengths = [cell["rounds"] and cell["rounds"]["acceptance_length"] for cell in cells]
    return {
        **against_best([eagle3, lookup], both),
        "acceptance_by_eagle3": round(lengths[3] / lengths[1], 3) if lengths[1] and lengths[3] else None,
        "texts_equal": all(cell["texts_equal"] for cell in cells),
    }


def said(comparisons: Sequence[dict[str, Any]]) -> str:
    """The verdict: tokens a second of every load, and the acceptance length of edits that were not sampled."""
    lines = [f"Both: {verdict(comparisons, name_of)}"]
    for found in comparisons:
        by_eagle3 = found["acceptance_by_eagle3"]
        if found["load"] == "edit" and found["temperature"] == 0 and by_eagle3 is not None:
            judged = "at least" if by_eagle3 >= EDIT_BAR else "MISSES"
            lines.append(f"Edits: {by_eagle3} times EAGLE3's acceptance length, {judged} the bar of {EDIT_BAR}.")
    return "\n".join(lines)


def name_of(found: dict[str, Any]) -> str:
    return f"{found['load']} at temperature {found['temperature']:g}"
