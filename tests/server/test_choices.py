"""Several choices and prompts of a call: the texts of single requests, over shared blocks."""

import http.client
import json

import openai
import pytest

from kimi_client import KimiClient
from kimi_openai import EndpointSettings
from support.openai_endpoint import running_endpoint
from support.server_process import assert_everything_is_free, gauge, wait_until_running
from support.waiting import PATIENCE_S

PROMPT = [7 + i % 250 for i in range(300)]
BLOCKS_OF_PROMPT = 300 // 64
FIELDS = {"max_tokens": 10, "temperature": 0.9}


@pytest.fixture(scope="module")
def endpoint(url):
    with running_endpoint(EndpointSettings(url=url)) as running:
        yield running


@pytest.fixture(scope="module")
def client(endpoint):
    with openai.OpenAI(base_url=endpoint.base_url, api_key="any", max_retries=0) as connected:
        yield connected


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("k", [0, 3])
def test_choices_of_prompts_are_what_single_requests_get(url, client, k, is_streamed):
    prompts = ["def add(a, b):", "class Stack:"]
    with KimiClient(url) as direct:
        expected = [
            direct.generate(text_input=prompt, seed=(5 + i) % 2**64, num_speculative_tokens=k, **FIELDS)
            for prompt in prompts
            for i in range(3)
        ]
    ask = {"model": "kimi", "prompt": prompts, "n": 3, "seed": 5, "extra_body": {"num_speculative_tokens": k}, **FIELDS}
    if is_streamed:
        texts, ends = [""] * 6, [None] * 6
        for chunk in client.completions.create(**ask, stream=True):
            for choice in chunk.choices:
                texts[choice.index] += choice.text
                ends[choice.index] = choice.finish_reason or ends[choice.index]
    else:
        reply = client.completions.create(**ask)
        assert [choice.index for choice in reply.choices] == list(range(6))
        texts, ends = [c.text for c in reply.choices], [c.finish_reason for c in reply.choices]
        assert reply.usage.prompt_tokens == sum(e.statistics["num_prompt_tokens"] for e in expected[::3])
    assert texts == [e.text for e in expected]
    assert ends == [e.finish_reason for e in expected]


def test_choices_share_their_prompts_blocks_and_leave_none(server, slow_steps, endpoint):
    """The gauge counts a shared block once; without sharing sixteen prompts would hold 16 * 4 in each pool."""
    connection = http.client.HTTPConnection("127.0.0.1", endpoint.port, timeout=PATIENCE_S)
    fields = {"prompt": PROMPT, "n": 16, "max_tokens": 150, "stream": True, "ignore_eos": True, "cache_salt": "own"}
    connection.request("POST", "/v1/completions", json.dumps(fields))
    reply = connection.getresponse()
    wait_until_running(server, 16)
    held = gauge(server, "kimi_kv_blocks_used")
    assert held <= 2 * (BLOCKS_OF_PROMPT + 16 * 3), "the prompt's once, and of each at most 3 of its own"
    reply.close()
    connection.close()
    assert_everything_is_free(server)


def test_one_prompt_that_fails_fails_the_call_by_its_index(client, server):
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="kimi", prompt=[[1, 2], [3] * 600, [4]], max_tokens=400)
    assert caught.value.param == "prompt[1]"
    assert_everything_is_free(server)
