"""Rows that failed and replies that lack what was asked for."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kimi_backend.engine.commit import commit_step
from kimi_backend.errors import KimiError
from kimi_backend.scheduler.scheduler import StepBatch
from kimi_backend.types.plan import STATUS_NOT_FINITE, AuxHandle, TargetReply
from kimi_backend.types.request import EndCause
from kimi_backend.types.scoring import TokenScores
from support.sequences import make_sequence


def reply(status: int = 0, scores: TokenScores | None = None) -> TargetReply:
    """The reply to a step in which one sequence drew nothing."""
    nothing: dict[str, Any] = {
        "num_accepted_tokens": np.zeros(0, np.int32),
        "output_token_ids": np.zeros((0, 1), np.int64),
    }
    return TargetReply(
        aux=AuxHandle(), step_id=1, runner_epoch=1, seq_status=np.array([status], np.int32), **nothing, scores=scores
    )


def plan(scoring: object = None) -> Any:
    return SimpleNamespace(num_sampled_rows=np.zeros(1, np.int32), scoring=scoring)


def test_a_chunk_that_failed_ends_its_sequence_and_a_good_one_counts() -> None:
    good, bad = make_sequence(), make_sequence()
    assert commit_step(StepBatch([good], [2], 0), plan(), reply(), 5.0, [True]) == []
    (output,) = commit_step(StepBatch([bad], [2], 0), plan(), reply(STATUS_NOT_FINITE), 5.0, [True])
    assert (good.target_len, good.finish) == (2, None)
    assert (output.sequence, output.time_s, output.finish) == (bad, 5.0, bad.finish)
    assert bad.finish is not None and bad.finish.cause is EndCause.BAD_LOGITS
    assert bad.target_len == 0


@pytest.mark.parametrize("given", [None, 1])
def test_scores_that_are_not_as_many_as_were_asked_are_a_bug(given: int | None) -> None:
    scores = None
    if given is not None:
        one = np.zeros(given, np.float32)
        tops = np.zeros((given, 0))
        scores = TokenScores(
            logprobs=one,
            ranks=one.astype(np.int64),
            top_ids=tops.astype(np.int64),
            top_logprobs=tops.astype(np.float32),
        )
    scoring = SimpleNamespace(rows=np.array([0, 1], np.int32))
    with pytest.raises(KimiError, match=f"target replied with {given} scores, 2 were asked"):
        commit_step(StepBatch([make_sequence()], [2], 0), plan(scoring), reply(scores=scores), 5.0, [True])
