"""Calls that a request forces, of random tools: each is in Kimi's envelope, its arguments fit, its id is canonical.

A short form with scripted models; two hundred of them, and kimi-nano's, are soak tests.
"""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from kimi_backend.config.settings import ServingSettings
from kimi_backend.grammar.compiler import GrammarCompiler
from kimi_backend.runners.load.loading import load_pair
from kimi_backend.scheduler.settings import SchedulerSettings
from kimi_backend.serving.grammar_fields import grammar_of
from kimi_backend.text.tokenizer import load_tokenizer
from kimi_backend.types.request import FinishReason, GenerateRequest, SamplingParams, ThinkingBudget
from kimi_client.replies import ArgumentsDelta, CallBegin, CallEnd, ContentDelta, DeclaredTools, Event, ReplyReader
from support.engine_runs import EngineHarness
from support.random_schemas import object_schema
from support.scripted_logits import LogitScript
from support.scripted_models import ScriptedDraft, ScriptedTarget, describe

NANO = Path(__file__).parents[3] / "demo" / "kimi-nano"
TOKENIZER = load_tokenizer(NANO)
VOCAB, EOS = TOKENIZER.vocab_size, frozenset(TOKENIZER.eos_token_ids)
CONTROLS = TOKENIZER.control_tokens
THINK_END = CONTROLS["</think>"]
SCRIPT = LogitScript(VOCAB)
NAMES = ("get_weather", "a.b", "my-tool", "x_1", "functions_y", "search")
MAX_TOKENS = 400


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    made = GrammarCompiler(TOKENIZER)
    yield made
    made.close()


def harness(compiler: GrammarCompiler, target: Any, draft: Any) -> EngineHarness:
    return EngineHarness(
        target, draft, SchedulerSettings(), EOS, lambda grammar: compiler.request(grammar, VOCAB).result(120)
    )


def scripted(compiler: GrammarCompiler) -> EngineHarness:
    sizes = {"block_size": 16, "max_model_len": 512, "num_blocks": 3000}
    return harness(
        compiler,
        ScriptedTarget(describe("target", SCRIPT, **sizes), SCRIPT),
        ScriptedDraft(describe("draft", SCRIPT, **sizes), SCRIPT),
    )


def trained(compiler: GrammarCompiler) -> EngineHarness:
    settings = ServingSettings(
        checkpoint=str(NANO),
        draft=str(NANO / "draft"),
        device="cpu",
        max_model_len=512,
        max_num_seqs=32,
        kv_tokens=20_000,
    )
    return harness(compiler, *load_pair(settings))


def random_fields(draw: random.Random) -> dict[str, Any]:
    """Tools, a choice that forces one or several calls of them, and a history that has some."""
    names = draw.sample(NAMES, draw.randint(1, 3))
    functions = [{"name": name, "parameters": object_schema(draw)} for name in names]
    call = {"id": "c", "type": "function", "function": {"name": names[0], "arguments": "{}"}}
    return {
        "tools": [{"type": "function", "function": function} for function in functions],
        "tool_choice": draw.choice(("required", {"type": "function", "function": {"name": names[-1]}})),
        "messages": [{"role": "assistant", "tool_calls": [call] * draw.randint(0, 3)}],
        "parallel_tool_calls": draw.random() < 0.5,
    }


def check_calls(engine: EngineHarness, num_calls: int, seed: int) -> None:
    draw = random.Random(seed)
    asked = []
    for index in range(num_calls):
        fields, is_thinking = random_fields(draw), draw.random() < 0.3
        sampling = SamplingParams(
            temperature=draw.choice((0.0, 1.0)),
            seed=index,
            max_tokens=MAX_TOKENS,
            grammar=grammar_of(fields, CONTROLS, THINK_END if is_thinking else None),
            thinking_budget=ThinkingBudget(draw.randrange(9), THINK_END) if is_thinking else None,
        )
        prompt = tuple(TOKENIZER.encode(f"call {index}:"))
        request = GenerateRequest(
            request_id=str(index), prompt_token_ids=prompt, sampling=sampling, num_speculative_tokens=draw.randrange(6)
        )
        asked.append((fields, is_thinking, engine.add(request)))
    engine.run()
    ended = [case for case in asked if case[2].finishes[0].reason is FinishReason.STOP]
    assert len(ended) >= 0.9 * num_calls
    for fields, is_thinking, outcome in ended:
        check_reply(fields, outcome.token_ids[:-1], is_thinking)


def check_reply(fields: dict[str, Any], token_ids: list[int], is_thinking: bool) -> None:
    events = read(fields, token_ids, is_thinking)
    begun = [event for event in events if isinstance(event, CallBegin)]
    assert begun and not any(isinstance(event, ContentDelta) for event in events)
    assert all(event.is_complete for event in events if isinstance(event, CallEnd))
    first = len(fields["messages"][0]["tool_calls"])
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in fields["tools"]}
    for index, call in enumerate(begun):
        assert call.call_id == f"functions.{call.name}:{first + index}"
        assert f"functions.{call.name}:{first + index}" in TOKENIZER.decode(token_ids), "as the model wrote it"
        arguments = "".join(e.text for e in events if isinstance(e, ArgumentsDelta) and e.index == index)
        jsonschema.validate(json.loads(arguments), schemas[call.name], jsonschema.Draft202012Validator)
    if fields["tool_choice"] != "required":
        assert [call.name for call in begun] == [fields["tool_choice"]["function"]["name"]]
    assert len(begun) == 1 or fields["parallel_tool_calls"]


def read(fields: dict[str, Any], token_ids: list[int], is_thinking: bool) -> list[Event]:
    reader = ReplyReader(DeclaredTools(fields["tools"], fields["messages"]), begins_thinking=is_thinking)
    controls = [place for place, token_id in enumerate(token_ids) if token_id in CONTROLS.values()]
    offsets = [len(TOKENIZER.decode(token_ids[:place])) for place in controls]
    return reader.feed(TOKENIZER.decode(token_ids), offsets, is_last=True)


def test_forced_calls(compiler: GrammarCompiler) -> None:
    check_calls(scripted(compiler), 12, seed=1)


@pytest.mark.soak
@pytest.mark.parametrize("make", [scripted, trained])
def test_two_hundred_forced_calls(compiler: GrammarCompiler, make: Any) -> None:
    check_calls(make(compiler), 200, seed=2)
