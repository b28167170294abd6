"""One request's output on its way out: text, stop strings, statistics. Touched by the emitter thread only."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Protocol

from kimi_backend.engine.commit import LogprobRows, StepOutput
from kimi_backend.engine.round_sampler import RoundSampler
from kimi_backend.scheduler.sequence import DraftState, Finish
from kimi_backend.scheduler.sequence import Sequence as EngineSequence
from kimi_backend.spec_decode.stats import ProposerCounter
from kimi_backend.text.text_stream import TextUpdate
from kimi_backend.types.request import EndCause, FinishReason, RequestStats, TokenDelta, TokenLogprobs, TokenOrigin
from kimi_backend.types.step_costs import StepCosts

DeltaSink = Callable[[TokenDelta], None]
"""Called on the emitter thread, in order, the last time with `finish_reason` set. Must not block for long."""


class OutputText(Protocol):
    """A function from token ids to text: `text.TextStream`, or nothing where there is no tokenizer."""

    @property
    def num_chars(self) -> int:
        """Characters of the whole text so far, those that wait for a stop string included."""

    def push(self, token_ids: Sequence[int]) -> TextUpdate: ...

    def finish(self) -> TextUpdate: ...


class NoText:
    """The text of an engine without a tokenizer: ids only."""

    num_chars = 0

    def push(self, token_ids: Sequence[int]) -> TextUpdate:
        return TextUpdate(text="", num_tokens=len(token_ids))

    def finish(self) -> TextUpdate:
        return TextUpdate(text="", num_tokens=0)


class RequestOutput:
    """Turns a request's step outputs into deltas, exactly one of them final.

    What a stop string cuts off is counted nowhere: tokens behind it, and steps that ran before the engine heard of it.
    """

    def __init__(
        self,
        sequence: EngineSequence,
        text: OutputText,
        sink: DeltaSink,
        synthetic_parts: tuple[str, ...] = (),
        speculation_policy: str = "",
        acceptance_problem: str | None = None,
        step_costs: dict[str, StepCosts] | None = None,
    ) -> None:
        """The last four are what the statistics say of the server: see `RequestStats`."""
        self.sequence = sequence
        self.sink = sink
        self.is_finished = False
        self.num_output_tokens = 0
        self.speculation = ProposerCounter(sequence.speculation.num_speculative_tokens)
        self._text = text
        self._synthetic_parts = synthetic_parts
        self._speculation_policy = speculation_policy
        self._acceptance_problem = acceptance_problem
        self._step_costs = step_costs or {}
        self._num_verifies = [0] * (sequence.speculation.num_speculative_tokens + 1)
        self._first_token_s: float | None = None
        most = sequence.request.return_round_times
        self._rounds = RoundSampler(most, sequence.arrival_s) if most else None

    def push(self, output: StepOutput) -> TokenDelta | None:
        """The delta of one step; None when nothing is to be said any more."""
        if self.is_finished:
            return None
        update, token_ids = self._push_text(output)
        if update.num_tokens and self._first_token_s is None:
            self._first_token_s = output.time_s
        if self.num_output_tokens:
            self._num_verifies[output.num_draft_tokens] += 1
        if self._rounds is not None:
            self._rounds.add(output, is_round=bool(self.num_output_tokens))
        self.num_output_tokens += update.num_tokens
        self.speculation.add(output.draft_origin, output.num_draft_tokens, output.num_accepted)
        finish, matched = output.finish, update.matched_stop
        text = update.text
        if matched is None and finish is not None:
            rest = self._text.finish()
            text, matched = text + rest.text, rest.matched_stop
        if matched is not None:
            finish = Finish(FinishReason.STOP)
        self.is_finished = finish is not None
        return TokenDelta(
            request_id=self.sequence.request.request_id,
            token_ids=tuple(token_ids),
            text=text,
            token_origins=self._origins(output, len(token_ids)),
            token_offsets=update.token_offsets,
            control_offsets=update.control_offsets,
            logprobs=_token_logprobs(output.logprobs, token_ids, self.sequence.params.logprobs or 0),
            finish_reason=None if finish is None else finish.reason,
            matched_stop=matched if matched is not None or finish is None else finish.matched_stop,
            error=None if finish is None else finish.error,
            cause=None if finish is None else finish.cause,
            stats=None if finish is None else self._stats(output.time_s),
            prompt_scores=output.prompt_scores,
        )

    def fail(self, message: str, time_s: float) -> TokenDelta:
        """The final delta of a request whose output cannot be made."""
        self.is_finished = True
        return TokenDelta(
            request_id=self.sequence.request.request_id,
            token_ids=(),
            finish_reason=FinishReason.ERROR,
            error=message,
            cause=EndCause.TEXT_FAILED,
            stats=self._stats(time_s),
        )

    def _origins(self, output: StepOutput, num_tokens: int) -> tuple[TokenOrigin, ...]:
        """Those of a step's tokens, where they were asked for: accepted ones come first."""
        if not self.sequence.request.return_token_origins:
            return ()
        return tuple(output.draft_origin if i < output.num_accepted else TokenOrigin.TARGET for i in range(num_tokens))

    def _push_text(self, output: StepOutput) -> tuple[TextUpdate, list[int]]:
        """The text that a step adds and the tokens that count. A stop token counts but is not shown unless asked."""
        token_ids, finish = output.token_ids, output.finish
        hides_last = (
            finish is not None and finish.matched_stop is not None and not self.sequence.params.include_stop_in_output
        )
        update = self._text.push(token_ids[:-1] if hides_last else token_ids)
        if hides_last and update.matched_stop is None:
            num_chars = self._text.num_chars
            offsets = (*update.token_offsets, num_chars) if self.sequence.request.return_token_origins else ()
            return dataclasses.replace(update, num_tokens=len(token_ids), token_offsets=offsets), token_ids
        return update, token_ids[: update.num_tokens]

    def _stats(self, end_s: float) -> RequestStats:
        sequence = self.sequence
        scheduled_s = end_s if sequence.first_scheduled_s is None else sequence.first_scheduled_s
        first_s = self._first_token_s
        return RequestStats(
            num_prompt_tokens=sequence.num_prompt_tokens,
            num_cached_tokens=sequence.num_cached_tokens or 0,
            num_output_tokens=self.num_output_tokens,
            max_tokens=sequence.max_num_tokens - sequence.num_prompt_tokens,
            queue_time_s=scheduled_s - sequence.arrival_s,
            first_token_time_s=None if first_s is None else first_s - sequence.arrival_s,
            total_time_s=end_s - sequence.arrival_s,
            num_preemptions=sequence.num_preemptions,
            seed=sequence.seed,
            speculation=self.speculation.all.snapshot(),
            speculation_by_proposer=self.speculation.snapshot_by_name(),
            proposer=sequence.proposer.value,
            speculation_policy=self._speculation_policy,
            is_draft_there=sequence.draft is not DraftState.AWAY,
            num_draft_tokens_histogram=tuple(self._num_verifies),
            acceptance_problem=self._acceptance_problem,
            synthetic_parts=self._synthetic_parts,
            round_times=() if self._rounds is None else tuple(self._rounds.kept),
            step_costs=self._step_costs,
        )


def _token_logprobs(rows: LogprobRows | None, token_ids: list[int], num_top: int) -> tuple[TokenLogprobs, ...]:
    if rows is None:
        return ()
    return tuple(
        TokenLogprobs(
            token_id=token_id,
            logprob=logprob,
            top=tuple(zip(top_ids[:num_top], top[:num_top], strict=True)),
        )
        for token_id, logprob, top_ids, top in zip(
            token_ids, rows.logprobs.tolist(), rows.top_ids.tolist(), rows.top_logprobs.tolist(), strict=False
        )
    )
