"""The draft tokens that the host proposes for a sequence's next verify: of its own text, or of its grammar."""

from collections.abc import Callable

from kimi_backend.scheduler.scheduler import Scheduler
from kimi_backend.scheduler.sequence import Sequence
from kimi_backend.spec_decode.lookup_choice import Candidate, LookupChooser
from kimi_backend.spec_decode.lookup_index import Match
from kimi_backend.spec_decode.lookup_pool import LookupPool
from kimi_backend.spec_decode.row_choice import Batch
from kimi_backend.types.request import TokenOrigin

MOST_GROWN_TOKENS = 2**14
"""Indexes grow one after the other, a step's share of about 1 ms: those of a prompt's many choices would all at once,
and every other request would wait."""


class HostDrafts:
    """Puts draft tokens into the batch table, where the host knows all tokens that count."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._chooser = LookupChooser()
        max_bytes = scheduler.settings.lookup_pool_bytes
        self._texts = LookupPool(max_bytes) if max_bytes else None

    def keep(self, sequence: Sequence) -> None:
        """Let others of its cache salt find what a sequence says that has come to its end."""
        if self._texts is None or sequence.lookup is None:
            return
        index = sequence.lookup.take_index()
        if index is not None:
            self._texts.keep(sequence.request.cache_salt, sequence.token_ids, index)

    def make(self, overlaps_next: Callable[[], bool]) -> None:
        """Propose the draft tokens of a verify that is behind nothing, before it is planned: what stood in the text
        before, then what the grammar lets come.

        Args:
            overlaps_next: tells whether the next verify would be behind that one, had each sequence one row.
        """
        table, running = self._scheduler.table, self._scheduler.running
        for sequence, match, count in self._looked_up(running, overlaps_next):
            assert sequence.lookup is not None
            draft_token_ids = sequence.lookup.continuation(sequence.token_ids, match, count)
            table.give_draft_tokens(sequence, draft_token_ids, TokenOrigin.LOOKUP)
        for sequence in running:
            if sequence.grammar is not None and sequence.is_decoding:
                proposals = table.pending_token_ids[sequence.row, 1 : 1 + sequence.num_draft_tokens]
                table.give_draft_tokens(sequence, sequence.look_ahead(proposals.tolist()), sequence.draft_origin)

    def are_worth_waiting_for(self, sequences: list[Sequence]) -> bool:
        """Tell whether the text of some, as far as the host knows it, has a match that a verify would check."""
        return bool(self._looked_up(sequences, lambda: True))

    def _looked_up(
        self, sequences: list[Sequence], overlaps_next: Callable[[], bool]
    ) -> list[tuple[Sequence, Match, int]]:
        """Those whose next draft tokens are looked up, where, and how many."""
        found, candidates, num_left = [], [], MOST_GROWN_TOKENS
        for sequence in sequences:
            lookup, most = sequence.lookup, sequence.most_draft_tokens
            if lookup is None or not most or not sequence.is_decoding:
                continue
            if num_left > 0 and lookup.is_crowded:
                lookup.grow(sequence.token_ids)
                num_left -= sequence.num_tokens
            salt = sequence.request.cache_salt
            match = lookup.find(sequence.token_ids, self._chooser.pools, self._texts, salt)
            if match is not None:
                most = lookup.most_draft_tokens(most)
                found.append((sequence, match))
                candidates.append(Candidate(lookup, match, sequence.speculation, sequence.num_draft_tokens, most))
        if not found:
            return []
        running = self._scheduler.running
        num_proposed, num_tokens = sum(s.num_draft_tokens for s in running), sum(s.num_tokens for s in running)
        is_drafting = any(s.uses_draft for s in running)
        batch = Batch(len(running), num_proposed, num_tokens, overlaps_next=overlaps_next(), is_drafting=is_drafting)
        counts = self._chooser.choose(candidates, self._scheduler.policy, batch)
        return [(sequence, match, count) for (sequence, match), count in zip(found, counts, strict=True) if count]
