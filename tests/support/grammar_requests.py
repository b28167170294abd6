"""Requests with grammars over the tempting tokenizer, beside requests without, and what compiles them."""

import functools
import json
import random
from dataclasses import replace

from kimi_backend.grammar.compiler import GrammarCompiler
from kimi_backend.grammar.matcher import CompiledGrammar
from kimi_backend.types.grammar import Choice, Form, Grammar, JsonSchema, Regex
from kimi_backend.types.request import GenerateRequest, ThinkingBudget
from support.random_requests import random_requests
from support.tiny_tokenizers import tempting_tokenizer

TOKENIZER = tempting_tokenizer()
VOCAB = TOKENIZER.vocab_size
EOS = frozenset(TOKENIZER.eos_token_ids)
THINK_END = TOKENIZER.control_tokens["</think>"]

OBJECT = {
    "type": "object",
    "properties": {
        "a": {"type": "string", "maxLength": 4},
        "tab": {"type": "array", "items": {"enum": [1, 12, "a b"]}, "maxItems": 3},
        "b": {"type": "integer", "minimum": -20, "maximum": 300},
        "st": {"anyOf": [{"type": "null"}, {"type": "boolean"}]},
    },
    "required": ["a", "st"],
}
FORMS: list[Form] = [
    JsonSchema(json.dumps(OBJECT)),
    JsonSchema(
        json.dumps({"type": "array", "prefixItems": [{"const": "tab 12"}, {"type": "boolean"}], "items": False})
    ),
    Regex("(ab|ba){1,4}[12]?x{0,2}"),
    Choice(("a tab", "a tab 12", "st")),
]


@functools.cache
def compiler() -> GrammarCompiler:
    """One for all tests of a process."""
    return GrammarCompiler(TOKENIZER)


def compile_grammar(grammar: Grammar) -> CompiledGrammar:
    return compiler().request(grammar, VOCAB).result(120)


def with_grammar(request: GenerateRequest, draw: random.Random) -> GenerateRequest:
    """The same with a grammar, that thoughts may stand before."""
    is_thinking = draw.random() < 0.3
    grammar = Grammar(draw.choice(FORMS), "response_format", begins_after=THINK_END if is_thinking else None)
    sampling = replace(
        request.sampling,
        grammar=grammar,
        thinking_budget=ThinkingBudget(draw.randrange(8), THINK_END) if is_thinking else None,
        max_tokens=60,
        ignore_eos=False,
        min_tokens=0,
        bad_words=(),
        allowed_token_ids=(),
        stop_token_ids=(),
    )
    return replace(request, sampling=sampling)


def grammar_requests(num_requests: int, seed: int = 3) -> list[GenerateRequest]:
    """Two of three have a grammar."""
    draw = random.Random(seed)
    plain = random_requests(draw, num_requests, VOCAB, longest_prompt=10, longest_output=30)
    return [request if index % 3 == 2 else with_grammar(request, draw) for index, request in enumerate(plain)]
