from dataclasses import fields, replace

import pytest

from kimi_backend.config.settings import ServingSettings
from kimi_backend.errors import ConfigError, InvalidRequestError
from kimi_backend.scheduler.admission import AdmissionLimits, check_request
from kimi_backend.scheduler.settings import SchedulerSettings
from kimi_backend.spec_decode.policy import PolicyName
from kimi_backend.types.proposer import Proposer
from kimi_backend.types.request import GenerateRequest, SamplingParams, ThinkingBudget

LIMITS = AdmissionLimits(vocab_size=100, max_model_len=50, max_sequence_slots=64, eos_token_ids=frozenset({6}))
SETTINGS = SchedulerSettings(max_speculative_tokens=5)
REQUEST = GenerateRequest(request_id="r", prompt_token_ids=(1, 2))
NAN, INFINITY = float("nan"), float("inf")


def check(**sampling: object) -> None:
    params = SamplingParams(**sampling)  # type: ignore[arg-type]
    check_request(replace(REQUEST, sampling=params), LIMITS, SETTINGS)


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("temperature", -0.1, "a finite number of at least 0"),
        ("temperature", NAN, "a finite number of at least 0"),
        ("temperature", INFINITY, "a finite number of at least 0"),
        ("top_k", -1, "0 to 2147483647"),
        ("top_k", 2**31, "0 to 2147483647"),
        ("top_p", 0.0, "above 0, up to 1"),
        ("top_p", 1.01, "above 0, up to 1"),
        ("top_p", NAN, "above 0, up to 1"),
        ("min_p", -0.01, "0 to 1"),
        ("min_p", 1.01, "0 to 1"),
        ("seed", -1, "0 to 18446744073709551615"),
        ("seed", 2**64, "0 to 18446744073709551615"),
        ("top_p", INFINITY, "above 0, up to 1"),
        ("repetition_penalty", 0.009, "0.01 to 100"),
        ("repetition_penalty", 101.0, "0.01 to 100"),
        ("repetition_penalty", NAN, "0.01 to 100"),
        ("frequency_penalty", -2.1, "-2 to 2"),
        ("frequency_penalty", 2.1, "-2 to 2"),
        ("presence_penalty", -2.1, "-2 to 2"),
        ("presence_penalty", 2.1, "-2 to 2"),
        ("min_tokens", -1, "0 to 2147483647"),
        ("min_tokens", 2**31, "0 to 2147483647"),
        ("max_tokens", -1, "0 to 2147483647"),
        ("max_tokens", 2**31, "0 to 2147483647"),
        ("logprobs", -1, "0 to 20"),
        ("logprobs", 21, "0 to 20"),
        ("prompt_logprobs", -1, "0 to 20"),
        ("prompt_logprobs", 21, "0 to 20"),
    ],
)
def test_a_number_out_of_range_is_refused(field: str, value: float, allowed: str) -> None:
    with pytest.raises(InvalidRequestError) as error:
        check(**{field: value})
    assert str(error.value) == f"{field}: {value} given, {allowed} is allowed"


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        ({"logit_bias": {100: 1.0}}, "logit_bias: token id 100 given, 0 to 99 is allowed"),
        ({"logit_bias": {5: 101.0}}, r"logit_bias\[5\]: 101.0 given, -100 to 100 is allowed"),
        ({"logit_bias": {5: -101.0}}, r"logit_bias\[5\]: -101.0 given"),
        ({"logit_bias": {5: NAN}}, r"logit_bias\[5\]: nan given"),
        ({"logit_bias": dict.fromkeys(range(4097), 0.0)}, "logit_bias: 4097 entries given, at most 4096 are allowed"),
        ({"bad_words": ((),)}, r"bad_words\[0\]: 0 tokens given, 1 to 64 are allowed"),
        ({"bad_words": ((1,), (1,) * 65)}, r"bad_words\[1\]: 65 tokens given, 1 to 64 are allowed"),
        ({"bad_words": ((1,), (2, -1))}, r"bad_words\[1\]: token id -1 given, 0 to 99 is allowed"),
        ({"bad_words": ((1,),) * 1025}, "bad_words: 1025 words given, at most 1024 are allowed"),
        ({"stop_token_ids": (100,)}, "stop_token_ids: token id 100 given"),
        ({"allowed_token_ids": (1, 200)}, "allowed_token_ids: token id 200 given"),
        (
            {"allowed_token_ids": (1, 2), "bad_words": ((2,), (1,), (3, 4))},
            "allowed_token_ids: each token that may",
        ),
        ({"allowed_token_ids": (5, 6), "stop_token_ids": (5,), "min_tokens": 1}, "or a stop token before min_tokens"),
        ({"stop_token_ids": tuple(range(100)), "min_tokens": 1}, "stop_token_ids: each token that may come is a bad"),
        ({"bad_words": tuple((i,) for i in range(100))}, "bad_words: each token that may come is a bad word; one"),
        ({"stop": ("a", "")}, "stop: 2 strings given, at most 16 non-empty ones are allowed"),
        ({"stop": ("a",) * 17}, "stop: 17 strings given"),
        ({"min_tokens": 9, "max_tokens": 8}, r"min_tokens: 9 given, at most max_tokens \(8\) is allowed"),
    ],
)
def test_a_wrong_list_is_refused(sampling: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        check(**sampling)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt_token_ids": ()}, "prompt: empty, at least 1 token is needed"),
        ({"prompt_token_ids": (1, 100)}, "prompt: token id 100 given, 0 to 99 is allowed"),
        ({"prompt_token_ids": (1, -5)}, "prompt: token id -5 given"),
        ({"prompt_token_ids": (1,) * 50}, "prompt: 50 tokens given, at most 49 are allowed"),
        ({"num_speculative_tokens": 6}, "num_speculative_tokens: 6 given, 0 to 5 is allowed"),
        ({"num_speculative_tokens": -1}, "num_speculative_tokens: -1 given"),
        ({"timeout_s": 0.0}, "timeout_s: 0.0 given, more than 0 seconds is allowed"),
        ({"timeout_s": NAN}, "timeout_s: nan given"),
        ({"timeout_s": -1.0}, "timeout_s: -1.0 given"),
        ({"priority": 2**31}, "priority: 2147483648 given"),
        ({"priority": -(2**31)}, "priority: -2147483648 given"),
        ({"return_round_times": 65}, "return_round_times: 65 given, 0 to 64 is allowed"),
        ({"return_round_times": -1}, "return_round_times: -1 given"),
    ],
)
def test_a_wrong_request_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        check_request(replace(REQUEST, **changes), LIMITS, SETTINGS)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("served", "allowed"),
    [
        (Proposer.NONE, [Proposer.NONE]),
        (Proposer.EAGLE3, [Proposer.NONE, Proposer.EAGLE3]),
        (Proposer.LOOKUP, [Proposer.NONE, Proposer.LOOKUP]),
        (Proposer.LOOKUP_EAGLE3, [Proposer.NONE, Proposer.EAGLE3, Proposer.LOOKUP, Proposer.LOOKUP_EAGLE3]),
    ],
)
def test_a_request_may_have_a_part_of_the_servers_proposer(served: Proposer, allowed: list[Proposer]) -> None:
    assert Proposer.parts_of(served) == allowed
    settings = replace(SETTINGS, proposer=served)
    for proposer in Proposer:
        request = replace(REQUEST, proposer=proposer)
        if proposer in allowed:
            check_request(request, LIMITS, settings)
            continue
        names = ", ".join(each.value for each in allowed)
        with pytest.raises(InvalidRequestError) as error:
            check_request(request, LIMITS, settings)
        assert str(error.value) == f"proposer: {proposer.value} given, one of {names} is allowed"


def test_the_pool_bounds_the_prompt_too() -> None:
    small = replace(LIMITS, max_sequence_slots=10)
    check_request(replace(REQUEST, prompt_token_ids=(1,) * 9), small, SETTINGS)
    with pytest.raises(InvalidRequestError, match="at most 9 are allowed"):
        check_request(replace(REQUEST, prompt_token_ids=(1,) * 10), small, SETTINGS)


def test_the_borders_are_allowed() -> None:
    check(temperature=0, top_p=1.0, min_p=1.0, seed=2**64 - 1, logprobs=20, min_tokens=8, max_tokens=8)
    check(frequency_penalty=-2, presence_penalty=-2, repetition_penalty=0.01, min_p=0, seed=0, top_k=2**31 - 1)
    check(frequency_penalty=2, presence_penalty=2, repetition_penalty=100, logprobs=0, prompt_logprobs=0, max_tokens=0)
    check(min_tokens=2**31 - 1, prompt_logprobs=20, stop=("a",) * 16)
    check(logit_bias={0: -100.0, 99: 100.0}, bad_words=((1,) * 64,), stop_token_ids=(0, 99))
    check(bad_words=((1,),) * 1024)
    many = SamplingParams(logit_bias=dict.fromkeys(range(4096), 0.0))
    check_request(replace(REQUEST, sampling=many), replace(LIMITS, vocab_size=4096), SETTINGS)
    for priority in (2**31 - 1, -(2**31) + 1):
        check_request(replace(REQUEST, priority=priority, return_round_times=64), LIMITS, SETTINGS)
    check_request(
        replace(REQUEST, prompt_token_ids=(1,) * 49, num_speculative_tokens=5, timeout_s=1e-9), LIMITS, SETTINGS
    )


def test_stop_tokens_may_be_all_there_is_once_they_are_not_banned() -> None:
    check(allowed_token_ids=(5, 6), stop_token_ids=(5,))
    check(allowed_token_ids=(5, 6), stop_token_ids=(5,), min_tokens=1, ignore_eos=True)
    check(stop_token_ids=tuple(range(100)))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs: 0 given, at least 1 is allowed"),
        ({"max_num_seqs": 9, "max_num_batched_tokens": 8}, "max_num_batched_tokens: 8 given, at least 9"),
        ({"max_prompt_tokens_beside_decode": -1}, "max_prompt_tokens_beside_decode: -1 given, at least 0 is allowed"),
        ({"max_queue_size": 0}, "max_queue_size: 0 given"),
        ({"lookup_min_match": 0}, "lookup_min_match: 0 given, at least 1 is allowed"),
        ({"lookup_memory_bytes": -1}, "lookup_memory_bytes: -1 given, at least 0 is allowed"),
        ({"lookup_pool_bytes": -1}, "lookup_pool_bytes: -1 given, at least 0 is allowed"),
        ({"draft_max_positions": -1}, "draft_max_positions: -1 given, at least 0 is allowed"),
        ({"max_speculative_tokens": 8}, "max_speculative_tokens: 8 given, 0 to 7 is allowed"),
        ({"max_speculative_tokens": -1}, "max_speculative_tokens: -1 given, 0 to 7 is allowed"),
        ({"max_speculative_tokens": 2}, "num_speculative_tokens: 3 given, 0 to 2 is allowed"),
        ({"num_speculative_tokens": -1}, "num_speculative_tokens: -1 given, 0 to 7 is allowed"),
    ],
)
def test_settings_out_of_range_are_refused(values: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SchedulerSettings(**values)  # type: ignore[arg-type]


def test_logprobs_are_at_most_the_vocabulary() -> None:
    limits = replace(LIMITS, vocab_size=12)
    for name in ("logprobs", "prompt_logprobs"):
        check_request(replace(REQUEST, sampling=SamplingParams(**{name: 12})), limits, SETTINGS)
        with pytest.raises(InvalidRequestError, match=f"^{name}: 13 given, 0 to 12 is allowed"):
            check_request(replace(REQUEST, sampling=SamplingParams(**{name: 13})), limits, SETTINGS)


def test_settings_at_their_borders_are_allowed() -> None:
    least = {"max_num_seqs": 1, "max_num_batched_tokens": 1, "max_queue_size": 1, "lookup_min_match": 1}
    least |= dict.fromkeys(("max_prompt_tokens_beside_decode", "lookup_memory_bytes", "lookup_pool_bytes"), 0)
    least |= dict.fromkeys(("draft_max_positions", "max_speculative_tokens", "num_speculative_tokens"), 0)
    settings = SchedulerSettings(**least)  # type: ignore[arg-type]
    assert {name: getattr(settings, name) for name in least} == least
    assert SchedulerSettings(num_speculative_tokens=7).max_speculative_tokens == 7


def test_defaults_are_those_of_a_server_but_for_the_policy() -> None:
    """An engine that is made in a program does what a server does, with k as it is asked for."""
    served = ServingSettings(draft="a folder")
    own = SchedulerSettings()
    names = {field.name for field in fields(SchedulerSettings)} & {field.name for field in fields(ServingSettings)}
    changed = {"speculation_policy", "proposer", "async_scheduling"}
    assert {name: getattr(own, name) for name in names - changed} == {
        name: getattr(served, name) for name in names - changed
    }
    assert (own.proposer, own.async_scheduling) == (served.chosen_proposer, served.async_scheduling == "true")
    assert own.lookup_memory_bytes == served.lookup_memory_mib << 20
    assert own.lookup_pool_bytes == served.lookup_pool_mib << 20
    assert (own.speculation_policy, own.enable_prefix_cache) == (PolicyName.FIXED, True)


def test_the_end_of_thoughts_must_be_free_to_come() -> None:
    budget = ThinkingBudget(3, 9)
    check(thinking_budget=budget, allowed_token_ids=(1, 2), stop_token_ids=(9,))
    for more in ({"bad_words": ((9,),)}, {"min_tokens": 5, "stop_token_ids": (9,)}):
        with pytest.raises(InvalidRequestError, match="thinking_token_budget: the token that ends thoughts may not be"):
            check(thinking_budget=budget, **more)


def test_the_scores_of_a_prompt_are_bounded_together() -> None:
    limits = replace(LIMITS, max_model_len=2**21, max_sequence_slots=2**21)

    def ask(num_tokens: int, num_top: int) -> None:
        params = SamplingParams(prompt_logprobs=num_top)
        request = GenerateRequest(request_id="r", prompt_token_ids=(1,) * num_tokens, sampling=params)
        check_request(request, limits, SETTINGS)

    ask(2**17, 1)
    with pytest.raises(InvalidRequestError, match="prompt_logprobs: 1 given for 131073 tokens, which are 262146 log"):
        ask(2**17 + 1, 1)
