"""The most tokens a second that any choice between a draft, a lookup and neither could make of recorded texts.

Whoever chose would know what is kept, and each request would pay for itself alone: a share of what a round takes of all
together, as if all streams were always busy, drafted in the same rounds to the same depth, and each row cost what it
costs in the widest step. Both make it faster than any engine is, so what is left to gain is less than it shows.
"""

from collections.abc import Sequence

import numpy as np

from kimi_backend.spec_decode.lookup import LookupMemory, LookupPools, SequenceLookup
from kimi_backend.spec_decode.step_times import StepTimes
from kimi_backend.types.request import MAX_SPECULATIVE_TOKENS
from lookup_suite.recorded import RecordedText
from replayed_policy import Machine

AWAY = -1
"""Draft tokens of a request that does not use the draft."""


class Prices:
    """Seconds of one request's part in rounds of so many."""

    def __init__(self, machine: Machine, streams: int, context_len: float) -> None:
        target, draft = StepTimes(machine.target), StepTimes(machine.draft)
        most = MAX_SPECULATIVE_TOKENS + 1
        steps = [sum(target.fixed_and_variable(streams, streams * n, n, context_len)) for n in range(1, most + 1)]
        self.base_s = (float(steps[0]) + machine.host_s) / streams
        rows = [(float(step) - float(steps[0])) / (streams * n) for n, step in enumerate(steps[1:], 1)]
        self.row_s = min(rows)
        extension = sum(draft.fixed_and_variable(streams, streams, 1, context_len))
        proposals = [float(draft.proposals(streams, k, context_len)) for k in range(most)]
        self.draft_s = [(float(extension) + machine.way_s + more) / streams for more in proposals]


def least_seconds(text: RecordedText, prices: Prices, *, drafts: bool, looks_up: bool, min_match: int) -> float:
    """Seconds in which a text could be written, its first token, which comes with the prompt, left out."""
    found = _foretold(text, min_match) if looks_up else [0] * len(text.tokens)
    count, ks = len(text.tokens), range(MAX_SPECULATIVE_TOKENS + 1)
    states = [AWAY, *ks] if drafts else [AWAY]
    best = {(count, state): 0.0 for state in states}
    for place in range(count - 1, 0, -1):
        kept = text.kept(place)
        for state in states:
            ways = [(0, 0), (found[place], found[place])]
            if state > 0:
                ways.append((state, min(state, kept)))
            best[place, state] = min(
                prices.base_s
                + num_rows * prices.row_s
                + min(
                    best[min(place + num_kept + 1, count), after] + (prices.draft_s[after] if after != AWAY else 0.0)
                    for after in states
                )
                for num_rows, num_kept in ways
            )
    return min(best[1, state] + (prices.draft_s[state] if state != AWAY else 0.0) for state in states)


def bound(
    texts: Sequence[RecordedText], machine: Machine, streams: int, *, drafts: bool, looks_up: bool, min_match: int
) -> float:
    """Tokens a second."""
    seconds = 0.0
    for text in texts:
        prices = Prices(machine, streams, len(text.prompt) + len(text.tokens) / 2)
        seconds += least_seconds(text, prices, drafts=drafts, looks_up=looks_up, min_match=min_match)
    return sum(len(text.tokens) - 1 for text in texts) / seconds


def _foretold(text: RecordedText, min_match: int) -> list[int]:
    """Count at each place how many of the next tokens the text's own match foretells."""
    whole = np.array([*text.prompt, *text.tokens], np.int32)
    start, pools = len(text.prompt), LookupPools()
    lookup = SequenceLookup.of(whole[:start], min_match, LookupMemory(1 << 30))
    assert lookup is not None
    found = []
    for place, token in enumerate(text.tokens):
        match = lookup.find(whole[: start + place], pools)
        most = min(MAX_SPECULATIVE_TOKENS, len(text.tokens) - 1 - place)
        guesses = [] if match is None else lookup.continuation(whole[: start + place], match, most)
        pairs = zip(guesses, text.tokens[place:], strict=False)
        found.append(next((i for i, (guess, true) in enumerate(pairs) if guess != true), len(guesses)))
        lookup.extend([token], whole[: start + place + 1])
    return found
