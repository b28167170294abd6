"""Replies to random schemas fit them, end, and are the same for every k: a short form, and a thousand of them."""

import json
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jsonschema
import pytest

from kimi_backend.grammar.compiler import GrammarCompiler
from kimi_backend.grammar.matcher import CompiledGrammar
from kimi_backend.grammar.schema_checks import check_schema, schema_text
from kimi_backend.scheduler.settings import SchedulerSettings
from kimi_backend.text.tokenizer import load_tokenizer
from kimi_backend.types.grammar import Grammar, JsonSchema
from kimi_backend.types.request import FinishReason, GenerateRequest, SamplingParams
from support.engine_runs import EngineHarness, Outcome
from support.random_schemas import Schema, random_schema
from support.scripted_logits import LogitScript
from support.scripted_models import ScriptedDraft, ScriptedTarget, describe

TOKENIZER = load_tokenizer(Path(__file__).parents[3] / "demo" / "kimi-nano")
VOCAB, EOS = TOKENIZER.vocab_size, frozenset(TOKENIZER.eos_token_ids)
SCRIPT = LogitScript(VOCAB)
MAX_TOKENS, BATCH = 240, 25
SIZES = {"block_size": 16, "max_model_len": 512, "num_blocks": 2000}


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    made = GrammarCompiler(TOKENIZER)
    yield made
    made.close()


def outcomes(
    compiler: GrammarCompiler, schemas: list[Schema], k: int, agreement: float, temperature: float
) -> list[Outcome]:
    def compiled(grammar: Grammar) -> CompiledGrammar:
        return compiler.request(grammar, VOCAB).result(120)

    harness = EngineHarness(
        ScriptedTarget(describe("target", SCRIPT, **SIZES), SCRIPT),
        ScriptedDraft(describe("draft", SCRIPT, **SIZES), SCRIPT, agreement),
        SchedulerSettings(),
        EOS,
        compiled,
    )
    found = []
    for index, schema in enumerate(schemas):
        grammar = Grammar(JsonSchema(schema_text(schema)), "response_format")
        sampling = SamplingParams(temperature=temperature, seed=index, max_tokens=MAX_TOKENS, grammar=grammar)
        prompt = tuple(index * 7 % VOCAB + offset for offset in range(3))
        request = GenerateRequest(
            request_id=str(index), prompt_token_ids=prompt, sampling=sampling, num_speculative_tokens=k
        )
        found.append(harness.add(request))
    harness.run()
    return found


def check_batch(compiler: GrammarCompiler, seed: int) -> int:
    """Count a batch's texts that end by themselves; those fit, and all are the same for every k."""
    draw = random.Random(seed)
    schemas = [random_schema(draw) for _ in range(BATCH)]
    for schema in schemas:
        check_schema(schema, "schema")
        jsonschema.Draft202012Validator.check_schema(schema)
    agreement, temperature = draw.choice((0.0, 0.9)), draw.choice((0.0, 1.0))
    num_ended, texts = 0, []
    for k in (0, 1, 3, 7):
        found = outcomes(compiler, schemas, k, agreement, temperature)
        texts.append([outcome.token_ids for outcome in found])
    assert texts[0] == texts[1] == texts[2] == texts[3]
    for schema, outcome in zip(schemas, found, strict=True):
        if outcome.finishes[0].reason is FinishReason.STOP:
            num_ended += 1
            text = TOKENIZER.decode(outcome.token_ids[:-1])
            jsonschema.validate(json.loads(text), schema, jsonschema.Draft202012Validator)
        else:
            assert outcome.finishes[0].reason is FinishReason.LENGTH, outcome.finishes[0]
    return num_ended


def test_random_schemas(compiler: GrammarCompiler) -> None:
    assert check_batch(compiler, 0) >= 0.9 * BATCH


@pytest.mark.soak
def test_a_thousand_schemas(compiler: GrammarCompiler) -> None:
    with ThreadPoolExecutor(1) as pool:
        assert sum(pool.map(lambda seed: check_batch(compiler, seed), range(1, 41))) >= 900
