"""Token deltas -> responses of `spec_ensemble`, merged where they could not be sent yet."""

import dataclasses
import json
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from kimi_backend.errors import InvalidRequestError
from kimi_backend.serving.triton_errors import coded_error
from kimi_backend.types.request import EndCause, FinishReason, RequestStats, SpeculationStats, TokenDelta, TokenLogprobs
from kimi_backend.types.scoring import TokenScores


def merge_deltas(deltas: Sequence[TokenDelta]) -> TokenDelta:
    """One delta that says what all of them say, in order. Only the last may be final."""
    if len(deltas) == 1:
        return deltas[0]
    return dataclasses.replace(
        deltas[-1],
        token_ids=tuple(token_id for delta in deltas for token_id in delta.token_ids),
        text="".join(delta.text for delta in deltas),
        token_origins=tuple(origin for delta in deltas for origin in delta.token_origins),
        token_offsets=tuple(offset for delta in deltas for offset in delta.token_offsets),
        control_offsets=tuple(offset for delta in deltas for offset in delta.control_offsets),
        logprobs=tuple(entry for delta in deltas for entry in delta.logprobs),
        prompt_scores=deltas[0].prompt_scores,
    )


def statistics_json(stats: RequestStats, matched_stop: str | int | None = None) -> dict[str, Any]:
    """Usage, times and speculation of a finished request, as JSON values; also the token that ended it, if one did."""
    values = dataclasses.asdict(stats)
    values["stop_token_id"] = matched_stop if isinstance(matched_stop, int) else None
    values["speculative_decoding"] = speculation_json(stats.speculation)
    values["speculation_by_proposer"] = {
        proposer: speculation_json(rounds) for proposer, rounds in stats.speculation_by_proposer.items()
    }
    del values["speculation"]
    values["pretences"] = values.pop("synthetic_parts")
    for name in ("acceptance_problem", "pretences", "round_times", "step_costs"):
        if not values[name]:
            del values[name]
    return values


def speculation_json(stats: SpeculationStats | None) -> dict[str, Any] | None:
    """AIPerf's `speculative_decoding` object and the counts a position behind it."""
    if stats is None:
        return None
    return {
        **dataclasses.asdict(stats),
        "num_spec_tokens": len(stats.drafted_per_position),
        "mean_acceptance_length": stats.mean_acceptance_length,
        "draft_acceptance_rate": stats.draft_acceptance_rate,
        "acceptance_per_position": list(stats.acceptance_per_position),
    }


def logprobs_json(entries: Sequence[TokenLogprobs], token_text: Callable[[int], str]) -> list[dict[str, Any]]:
    """One object a token: its text, id and logprob, and the most likely tokens there."""

    def token_json(token_id: int, logprob: float) -> dict[str, Any]:
        return {"token": token_text(token_id), "token_id": token_id, "logprob": logprob}

    return [
        {**token_json(entry.token_id, entry.logprob), "top": [token_json(*pair) for pair in entry.top]}
        for entry in entries
    ]


LEAST_LOGPROB = -9999.0
"""The stand-in for minus infinity, which JSON does not have."""


def prompt_logprobs_json(token_ids: Sequence[int], scores: TokenScores, token_json: Callable[[int], str]) -> str:
    """A JSON list of one object a prompt token, as `logprobs_json` makes them, with the token's rank.

    Written entry by entry, so that other threads run meanwhile: a prompt has many.

    Args:
        token_ids: [N + 1] the prompt; nothing precedes its first token.
        scores: [N].
        token_json: the text of a token alone, as a JSON string.
    """
    first = token_ids[0]
    entries = [f'{{"token": {token_json(first)}, "token_id": {first}, "logprob": null, "rank": null, "top": []}}']
    for token_id, logprob, rank, top_ids, top_logprobs in zip(
        token_ids[1:],
        np.maximum(scores.logprobs, LEAST_LOGPROB).tolist(),
        scores.ranks.tolist(),
        scores.top_ids.tolist(),
        np.maximum(scores.top_logprobs, LEAST_LOGPROB).tolist(),
        strict=True,
    ):
        top = ", ".join(
            f'{{"token": {token_json(top_id)}, "token_id": {top_id}, "logprob": {top_logprob}}}'
            for top_id, top_logprob in zip(top_ids, top_logprobs, strict=True)
        )
        entries.append(
            f'{{"token": {token_json(token_id)}, "token_id": {token_id}, "logprob": {logprob}, "rank": {rank},'
            f' "top": [{top}]}}'
        )
    return f"[{', '.join(entries)}]"


MOST_KEPT = 64
"""Counts below it are kept, as is the empty text."""


class ResponseBuilder:
    """Builds the output tensors of one response.

    A tensor costs its making, an allocation of shared memory and a copy; five of the six of a usual delta say what
    other deltas have said before. Those are made once and sent again and again: the server only reads them.
    """

    def __init__(self, pb_utils: Any, token_text: Callable[[int], str]) -> None:
        """token_text: of a token alone, as log-probabilities show it."""
        self._pb = pb_utils
        self._token_text = token_text
        self._token_json = lru_cache(maxsize=None)(lambda token_id: json.dumps(token_text(token_id)))
        self._kept: dict[tuple[str, str | int], Any] = {}

    def build(
        self,
        delta: TokenDelta,
        *,
        num_input_tokens: int,
        return_token_ids: bool,
        with_logprobs: bool,
        prompt_token_ids: Sequence[int] = (),
        return_control_offsets: bool = False,
        begins_thinking: bool | None = None,
        scored_prompt: Sequence[int] = (),
    ) -> Any:
        """
        Args:
            num_input_tokens: 0 in all but a request's first response: clients add them up.
            prompt_token_ids: to be sent; empty in all but a first response, and where they were not asked for.
            begins_thinking: to be sent; None likewise.
            scored_prompt: the tokens of the prompt, for a delta that has their scores.
        """
        reason = "" if delta.finish_reason is None else delta.finish_reason.value
        stop = delta.error if delta.matched_stop is None else str(delta.matched_stop)
        statistics = "" if delta.stats is None else json.dumps(statistics_json(delta.stats, delta.matched_stop))
        tensors = [
            self._text("text_output", delta.text),
            self._text("finish_reason", reason),
            self._text("stop_reason", stop or ""),
            self._count("num_input_tokens", num_input_tokens),
            self._count("num_output_tokens", len(delta.token_ids)),
            self._text("statistics", statistics),
        ]
        if return_token_ids:
            tensors.append(self._ids("output_ids", delta.token_ids))
        if delta.token_origins:
            tensors += [
                self._ids("token_origins", delta.token_origins),
                self._ids("token_offsets", delta.token_offsets),
            ]
        if prompt_token_ids:
            tensors.append(self._ids("prompt_token_ids", prompt_token_ids))
        if return_control_offsets and delta.control_offsets:
            tensors.append(self._ids("control_offsets", delta.control_offsets))
        if begins_thinking is not None:
            tensors.append(self._pb.Tensor("begins_thinking", np.array([[begins_thinking]])))
        if with_logprobs:
            tensors.append(self._text("logprobs", json.dumps(logprobs_json(delta.logprobs, self._token_text))))
        if delta.prompt_scores is not None:
            text = prompt_logprobs_json(scored_prompt, delta.prompt_scores, self._token_json)
            tensors.append(self._text("prompt_logprobs", text))
        return self._pb.InferenceResponse(output_tensors=tensors)

    def build_error(self, delta: TokenDelta) -> Any:
        """A response that ends a request by an error: its bans, the engine's failure, or CANCELLED by a shutdown."""
        code = "CANCELLED" if delta.finish_reason is FinishReason.CANCELLED else "INTERNAL"
        if delta.cause in (EndCause.NO_TOKEN_LEFT, EndCause.BAD_GRAMMAR):
            code = InvalidRequestError.code
        error = coded_error(self._pb, code, delta.error or "internal error")
        return self._pb.InferenceResponse(output_tensors=[], error=error)

    def _ids(self, name: str, token_ids: Sequence[int]) -> Any:
        return self._pb.Tensor(name, np.array([token_ids], dtype=np.int32).reshape(1, -1))

    def _text(self, name: str, text: str) -> Any:
        return self._kept_empty(name) if not text else self._make_text(name, text)

    def _count(self, name: str, number: int) -> Any:
        kept = self._kept.get((name, number))
        if kept is None:
            kept = self._pb.Tensor(name, np.array([[number]], dtype=np.uint32))
            if number < MOST_KEPT:
                self._kept[name, number] = kept
        return kept

    def _kept_empty(self, name: str) -> Any:
        kept = self._kept.get((name, ""))
        if kept is None:
            kept = self._kept[name, ""] = self._make_text(name, "")
        return kept

    def _make_text(self, name: str, text: str) -> Any:
        return self._pb.Tensor(name, np.array([[text.encode("utf-8")]], dtype=np.object_))
