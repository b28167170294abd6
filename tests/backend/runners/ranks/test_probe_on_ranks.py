"""The probe where two ranks share the models: the scores of one, and no process started for nothing."""

import pytest

from kimi_backend.config.settings import ServingSettings
from kimi_backend.errors import ConfigError
from kimi_backend.probe import ranks
from kimi_backend.probe.probing import ProbeResult, ranking
from kimi_backend.probe.ranks import ProbeJob, opened_on_ranks
from kimi_backend.text.tokenizer import load_tokenizer
from support.nano_runs import NANO

PROMPTS = ("class Stack:\n    def __init__(self):\n",)


def job(size: int) -> ProbeJob:
    settings = ServingSettings(checkpoint=str(NANO), draft=str(NANO / "draft"), device="cpu", tensor_parallel_size=size)
    encode = load_tokenizer(NANO).encode
    prompts = tuple(tuple(encode(prompt)) for prompt in PROMPTS)
    return ProbeJob(settings=settings, prompts=prompts, num_tokens=8, num_draft_tokens=2)


def results(wanted: ProbeJob) -> list[ProbeResult]:
    with opened_on_ranks(wanted) as opened:
        texts = opened.write_texts(wanted.prompts, wanted.num_tokens)
        return list(opened.run(texts, wanted.num_draft_tokens))


def test_two_ranks_score_as_one_and_rank_the_true_setting_first() -> None:
    found = results(job(2))
    assert found == results(job(1))
    assert len(found) > 20
    lengths = [result.acceptance_length for result in found]
    assert max(lengths) > 1.5 * min(lengths)
    assert ranking(found)[0].setting.is_files_own


def test_a_size_that_does_not_divide_starts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks.subprocess, "Popen", None)
    with pytest.raises(ConfigError, match="3 given, which does not divide"), opened_on_ranks(job(3)):
        pass
