"""Log-probabilities of a completion and of a prompt, in the API's forms."""

from kimi_client import PromptLogprob, TokenLogprob
from kimi_openai.logprobs import CompletionLogprobs, _chat_entry, shown_prompt_logprobs

FIRST = PromptLogprob(7, None, None, token="d")
SECOND = PromptLogprob(8, -2.0, 5, ((1, -0.5), (2, -1.0), (3, -1.5)), "ef", ("a", "b", "c"))


def test_a_prompts_are_by_id_and_its_first_token_has_none():
    assert shown_prompt_logprobs([FIRST, SECOND], None) == {}
    assert shown_prompt_logprobs([FIRST, SECOND], 2) == {
        "prompt_logprobs": [
            None,
            {
                "1": {"logprob": -0.5, "rank": 1, "decoded_token": "a"},
                "2": {"logprob": -1.0, "rank": 2, "decoded_token": "b"},
                "8": {"logprob": -2.0, "rank": 5, "decoded_token": "ef"},
            },
        ]
    }
    (likeliest,) = shown_prompt_logprobs([PromptLogprob(1, -0.5, 1, ((1, -0.5),), "a", ("a",))], 1)["prompt_logprobs"]
    assert likeliest == {"1": {"logprob": -0.5, "rank": 1, "decoded_token": "a"}}


def test_a_completions_offsets_go_on():
    shown = CompletionLogprobs(2)
    assert shown.take([FIRST, SECOND]) == {
        "tokens": ["d", "ef"],
        "token_logprobs": [None, -2.0],
        "top_logprobs": [None, {"a": -0.5, "b": -1.0, "ef": -2.0}],
        "text_offset": [0, 1],
    }
    twice = TokenLogprob(4, -3.0, ((5, -0.1), (6, -0.2)), "g", ("x", "x"))
    assert shown.take([twice]) == {
        "tokens": ["g"],
        "token_logprobs": [-3.0],
        "top_logprobs": [{"x": -0.1, "g": -3.0}],
        "text_offset": [3],
    }


def test_a_chats_token_has_its_bytes_where_they_are_known():
    entry = _chat_entry(TokenLogprob(4, -3.0, ((5, -0.1),), "ü", ("\ufffd",)))
    assert entry == {
        "token": "ü",
        "logprob": -3.0,
        "bytes": [195, 188],
        "top_logprobs": [{"token": "\ufffd", "logprob": -0.1, "bytes": None}],
    }
