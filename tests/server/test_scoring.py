"""Scores of prompts through the server and through the endpoint's two forms of them."""

import math

import openai
import pytest

from kimi_client import KimiClient
from kimi_openai import EndpointSettings
from support.openai_endpoint import running_endpoint

PROMPT = [11 + 7 * i % 240 for i in range(300)]


@pytest.fixture(scope="module")
def client(url):
    with (
        running_endpoint(EndpointSettings(url=url)) as running,
        openai.OpenAI(base_url=running.base_url, api_key="any", max_retries=0) as connected,
    ):
        yield connected


@pytest.fixture(scope="module")
def scored(url):
    with KimiClient(url) as direct:
        return direct.generate(input_ids=PROMPT, prompt_logprobs=2, max_tokens=0, echo=True)


def test_scores_are_those_of_drawing_the_same_tokens(url, scored):
    """A request that has as its prompt what another one drew is told the same scores."""
    with KimiClient(url) as direct:
        fields = {"temperature": 0.0, "logprobs": 2, "max_tokens": 8, "return_token_ids": True, "ignore_eos": True}
        drawn = direct.generate(input_ids=PROMPT, num_speculative_tokens=3, **fields)
        again = direct.generate(input_ids=[*PROMPT, *drawn.token_ids], prompt_logprobs=2, max_tokens=1, seed=1)
        with direct.stream(input_ids=PROMPT, prompt_logprobs=2, max_tokens=3, temperature=0.0, stream=True) as stream:
            chunks = list(stream)
    assert again.statistics["num_cached_tokens"] == 0
    assert [e.token_id for e in again.prompt_logprobs] == [*PROMPT, *drawn.token_ids]
    for found, expected in zip(again.prompt_logprobs[-8:], drawn.logprobs, strict=True):
        assert found.logprob == pytest.approx(expected.logprob, abs=1e-4)
        assert found.top == tuple((token_id, pytest.approx(value, abs=1e-4)) for token_id, value in expected.top)
        assert (found.rank, found.token) == (1, expected.token)
    assert (scored.num_output_tokens, scored.finish_reason, len(scored.prompt_logprobs)) == (0, "length", 300)
    assert (scored.prompt_logprobs[0].logprob, scored.prompt_logprobs[0].rank) == (None, None)
    assert [bool(chunk.prompt_logprobs) for chunk in chunks] == [True] + [False] * (len(chunks) - 1)
    for one, other in zip(chunks[0].prompt_logprobs[1:], scored.prompt_logprobs[1:], strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)


@pytest.mark.parametrize("is_streamed", [False, True])
def test_echo_with_logprobs_is_openais(client, scored, is_streamed):
    fields = {"model": "kimi", "prompt": PROMPT, "echo": True, "logprobs": 2, "temperature": 0.0, "max_tokens": 2}
    reply = client.completions.create(**fields, stream=is_streamed, extra_body={"ignore_eos": True})
    choices = [chunk.choices[0] for chunk in (reply if is_streamed else [reply])]
    found = [choice.logprobs for choice in choices]
    tokens = [token for part in found for token in part.tokens]
    logprobs = [logprob for part in found for logprob in part.token_logprobs]
    offsets = [offset for part in found for offset in part.text_offset]
    assert tokens[:300] == [entry.token for entry in scored.prompt_logprobs]
    assert len(tokens) == 302 and logprobs[0] is None and found[0].top_logprobs[0] is None
    assert logprobs[1:300] == pytest.approx([entry.logprob for entry in scored.prompt_logprobs[1:]], abs=1e-4)
    assert offsets == [sum(map(len, tokens[:i])) for i in range(302)]
    assert "".join(choice.text for choice in choices).startswith(scored.text)


def test_prompt_logprobs_are_vllms(client, scored):
    fields = {"model": "kimi", "prompt": [PROMPT, PROMPT[:20]], "max_tokens": 0, "echo": True, "logprobs": 1}
    reply = client.completions.create(**fields, extra_body={"prompt_logprobs": 2})
    long, short = (choice.model_extra["prompt_logprobs"] for choice in reply.choices)
    assert (long[0], len(long), len(short), reply.usage.completion_tokens) == (None, 300, 20, 0)
    for entries, entry in zip(long[1:], scored.prompt_logprobs[1:], strict=True):
        own = entries[str(entry.token_id)]
        assert own["logprob"] == pytest.approx(entry.logprob, abs=1e-4)
        assert (own["rank"], own["decoded_token"]) == (entry.rank, entry.token)
        assert [entries[str(token_id)]["rank"] for token_id, _ in entry.top] == [1, 2]
        assert len(entries) == (2 if entry.rank <= 2 else 3)
    assert all(len(top) <= 2 for top in reply.choices[0].logprobs.top_logprobs[1:])
    chat = {"model": "kimi", "messages": [{"role": "user", "content": "a"}], "max_tokens": 1, "seed": 1}
    beside = client.chat.completions.create(**chat, extra_body={"prompt_logprobs": 0}).model_extra["prompt_logprobs"]
    assert beside[0] is None and all(len(entries) == 1 for entries in beside[1:])
    assert sum(math.exp(entry["logprob"]) <= 1 for entries in beside[1:] for entry in entries.values()) > 3


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"echo": True, "logprobs": 21}, "logprobs"),
    ],
)
def test_what_is_refused(client, fields, param):
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="kimi", prompt="a", extra_body=fields)
    assert caught.value.param == param
