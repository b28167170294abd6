"""The setting `proposer`: what follows from it and from whether there is a draft."""

import pytest

from kimi_backend.config.settings import ServingSettings
from kimi_backend.errors import ConfigError, InvalidRequestError
from kimi_backend.scheduler.admission import AdmissionLimits, check_request
from kimi_backend.scheduler.settings import SchedulerSettings
from kimi_backend.types.proposer import Proposer
from kimi_backend.types.request import GenerateRequest


@pytest.mark.parametrize(
    ("given", "draft", "proposer", "most"),
    [
        ("", "d", Proposer.EAGLE3, 7),
        ("", "", Proposer.NONE, 0),
        ("lookup", "", Proposer.LOOKUP, 7),
        ("lookup", "d", Proposer.LOOKUP, 7),
        ("lookup+eagle3", "d", Proposer.LOOKUP_EAGLE3, 7),
        ("none", "", Proposer.NONE, 0),
    ],
)
def test_it_follows_from_the_draft_where_it_is_empty(given: str, draft: str, proposer: Proposer, most: int) -> None:
    settings = ServingSettings(proposer=given, draft=draft)
    assert (settings.chosen_proposer, settings.most_draft_tokens) == (proposer, most)
    assert bool(settings.lookup_bytes) is proposer.uses_lookup


@pytest.mark.parametrize("given", ["eagle3", "lookup+eagle3"])
def test_eagle3_needs_a_draft(given: str) -> None:
    with pytest.raises(ConfigError, match="'none' or 'lookup' is allowed without a draft"):
        ServingSettings(proposer=given)


@pytest.mark.parametrize("served", list(Proposer))
@pytest.mark.parametrize("asked", list(Proposer))
def test_a_request_may_ask_for_part_of_what_is_served(served: Proposer, asked: Proposer) -> None:
    limits = AdmissionLimits(vocab_size=10, max_model_len=10, max_sequence_slots=10)
    request = GenerateRequest(request_id="r", prompt_token_ids=(1,), proposer=asked)
    is_allowed = asked in (served, Proposer.NONE) or served is Proposer.LOOKUP_EAGLE3
    if is_allowed:
        check_request(request, limits, SchedulerSettings(proposer=served))
        return
    with pytest.raises(InvalidRequestError, match=f"proposer: {asked.value.replace('+', '.')} given, one of none"):
        check_request(request, limits, SchedulerSettings(proposer=served))
