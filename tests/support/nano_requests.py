"""Requests of kimi-nano that are run twice: through a server, and in this process one after another."""

from typing import Any

from kimi_backend.config.settings import ServingSettings
from kimi_backend.runners.load.loading import load_pair
from kimi_backend.text.tokenizer import load_tokenizer
from kimi_backend.types.request import GenerateRequest, SamplingParams
from kimi_client import KimiClient
from support.engine_runs import generate
from support.nano_runs import NANO, PROMPTS

MAX_TOKENS = 48

Fields = dict[str, Any]
Result = tuple[list[int], int]
"""Output tokens, and how many of them the draft had guessed."""


def request_fields(draft_tokens: tuple[int, ...]) -> list[Fields]:
    """A request a prompt, greedy and at temperature 1 by turns, with these numbers of draft tokens by turns."""
    return [
        {
            "text_input": prompt,
            "temperature": float(i % 2),
            "seed": i,
            "max_tokens": MAX_TOKENS,
            "ignore_eos": True,
            "num_speculative_tokens": draft_tokens[i % len(draft_tokens)],
        }
        for i, prompt in enumerate(PROMPTS)
    ]


def run_in_process(settings: ServingSettings, fields: list[Fields]) -> list[Result]:
    """One request after another."""
    tokenizer = load_tokenizer(str(NANO))
    target, draft = load_pair(settings)
    outcomes = [generate(target, draft, [_request(tokenizer.encode(one["text_input"]), one)])[0] for one in fields]
    return [(list(o.token_ids), sum(accepted for _, accepted in o.rounds)) for o in outcomes]


def _request(prompt_token_ids: list[int], fields: Fields) -> GenerateRequest:
    return GenerateRequest(
        request_id=fields["text_input"],
        prompt_token_ids=tuple(prompt_token_ids),
        sampling=SamplingParams(
            temperature=fields["temperature"],
            seed=fields["seed"],
            max_tokens=fields["max_tokens"],
            ignore_eos=fields["ignore_eos"],
        ),
        num_speculative_tokens=fields["num_speculative_tokens"],
    )


def run_served(client: KimiClient, fields: list[Fields]) -> list[Result]:
    """All of them together."""
    streams = [client.stream(**one, return_token_ids=True) for one in fields]
    results = [stream.result() for stream in streams]
    return [(list(r.token_ids), r.speculation["num_accepted_draft_tokens"]) for r in results]
