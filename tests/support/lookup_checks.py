"""The proposals of a sequence's text, by their definition, and a check of every verify against them."""

from collections.abc import Callable, Sequence
from typing import Any

from kimi_backend.scheduler.sequence import Sequence as EngineSequence
from kimi_backend.spec_decode.lookup_index import Match
from kimi_backend.types.plan import TargetPlan
from kimi_backend.types.request import TokenOrigin
from support.engine_runs import EngineHarness


class WrongDraftTokenError(AssertionError):
    """A verify checks other tokens than what followed where the text's last tokens stood before."""


def plain_match(text: Sequence[int], min_match: int, most: int = 10**9) -> Match | None:
    """The longest match among the `most` latest places whose last `min_match` tokens are the text's."""
    best, num_seen = None, 0
    for end in range(len(text) - 1, 0, -1):
        length = 0
        while length < end and text[end - 1 - length] == text[-1 - length]:
            length += 1
        num_seen += length >= min_match
        if length >= min_match and num_seen <= most and (best is None or length > best.length):
            best = Match(length, end)
    return best


def plain_continuation(text: Sequence[int], match: Match, count: int) -> list[int]:
    """Token by token: what is proposed counts as text."""
    known = list(text)
    for place in range(match.end, match.end + count):
        known.append(known[place])
    return known[len(text) :]


def checks_looked_up_rows(harness: EngineHarness, launch: Callable[[TargetPlan], Any]) -> Callable[[TargetPlan], Any]:
    """A target's `launch` that raises WrongDraftTokenError first."""

    def checked(plan: TargetPlan) -> Any:
        scheduler = harness.core.scheduler
        at_row = {sequence.row: sequence for sequence in scheduler.running}
        first = 0
        for row, num_rows, num_given in zip(
            plan.table_rows.tolist(), plan.rows.query_lens.tolist(), plan.num_given.tolist(), strict=True
        ):
            tokens = plan.rows.token_ids[first : first + num_rows].tolist()
            _check(at_row[row], tokens, num_given, scheduler.settings.lookup_min_match)
            first += num_rows
        return launch(plan)

    return checked


def _check(sequence: EngineSequence, tokens: list[int], num_given: int, min_match: int) -> None:
    if not sequence.is_decoding:
        if sequence.num_draft_tokens:
            raise WrongDraftTokenError(f"{sequence.num_draft_tokens} draft tokens while the prompt is being read")
        return
    text = sequence.token_ids.tolist()
    match = plain_match(text, min_match)
    if sequence.lookup is not None and sequence.lookup._index is not None:
        found = sequence.lookup._index.find(sequence.token_ids)
        if found != match:
            raise WrongDraftTokenError(f"{found} is found in {text}, expected {match}")
    if sequence.draft_origin is TokenOrigin.LOOKUP and len(tokens) > 1:
        expected = [] if match is None else plain_continuation(text, match, len(tokens) - 1)
        if tokens != [text[-1], *expected] or num_given != len(tokens):
            raise WrongDraftTokenError(f"{tokens} behind {text}: {match} gives {expected}; {num_given} are given")
