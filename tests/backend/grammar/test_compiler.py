"""Grammars are compiled in processes of their own, within bounds, and matched token by token."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import pytest

from kimi_backend.errors import CapacityError, InvalidRequestError
from kimi_backend.grammar.compiler import MIB, CompileLimits, GrammarCompiler
from kimi_backend.grammar.matcher import CompiledGrammar, Matcher
from kimi_backend.grammar.window import SequenceGrammar
from kimi_backend.grammar.xgrammar_matcher import XgrammarMatcher, XgrammarVocabulary
from kimi_backend.text.tokenizer import Tokenizer, load_tokenizer
from kimi_backend.types.grammar import CallTokens, Choice, Ebnf, Form, Grammar, JsonSchema, Regex, Tool, ToolCalls
from support.tiny_tokenizers import byte_level_hf_tokenizer, tempting_tokenizer
from support.waiting import PATIENCE_S

NANO = Path(__file__).parents[3] / "demo" / "kimi-nano"
WEATHER = Tool(
    "get_weather",
    json.dumps(
        {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 9}, "unit": {"enum": ["c", "f"]}},
            "required": ["city"],
        }
    ),
)


def endless(letter: str) -> JsonSchema:
    """A form that takes the library ten seconds and more."""
    return JsonSchema(json.dumps({"enum": [f"{letter}{i}" for i in range(100_000)]}))


ENDLESS = endless("k")
VAST = Regex("((a{1,3000}){1,3000}b){1,3000}" * 20)


class Compiled:
    """A compiler beside its tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.compiler = GrammarCompiler(tokenizer, CompileLimits(timeout_s=PATIENCE_S))

    def grammar(self, form: Form) -> CompiledGrammar:
        return self.compiler.request(Grammar(form, "f"), self.tokenizer.vocab_size).result(PATIENCE_S)

    def ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, allow_special=True)

    def allowed(self, matcher: Matcher) -> set[int]:
        words = np.zeros(-(-self.tokenizer.vocab_size // 32), np.int32)
        matcher.fill(words)
        return set(np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist())

    def forced(self, matcher: Matcher) -> int | None:
        words = np.zeros(-(-self.tokenizer.vocab_size // 32), np.int32)
        matcher.fill(words)
        return matcher.forced(words)

    def takes(self, form: Form, text: str) -> bool:
        """Return whether the text follows the grammar to its end, each token of it allowed by its mask."""
        matcher = self.grammar(form).matcher()
        for token_id in self.ids(text):
            if token_id not in self.allowed(matcher):
                return False
            assert matcher.accept(token_id)
        ends = set(self.tokenizer.eos_token_ids)
        assert self.allowed(matcher) & ends in (set(), ends)
        return ends <= self.allowed(matcher)


TOKENIZERS = {"kimi-nano": lambda: load_tokenizer(NANO), "byte level": byte_level_hf_tokenizer}


@pytest.fixture(scope="module", params=TOKENIZERS)
def compiled(request: pytest.FixtureRequest) -> Iterator[Compiled]:
    made = Compiled(TOKENIZERS[request.param]())
    yield made
    made.compiler.close()


@pytest.fixture(scope="module")
def nano() -> Iterator[Compiled]:
    made = Compiled(load_tokenizer(NANO))
    yield made
    made.compiler.close()


FORMS = [
    (JsonSchema('{"type": "object"}'), ["{}", '{"a": [1, -2.5e3, {"b": null}]}'], ["[]", "{", " {}", '{"a":1}']),
    (JsonSchema(WEATHER.schema), ['{"city": "Bern", "unit": "f"}', '{"city": ""}'], ["{}", '{"city": "a\tb"}']),
    (Regex("[ab]{2}x?"), ["ab", "bax"], ["a", "abb", "abxx"]),
    (Choice(("ab", 'b"\n', "ü")), ["ab", 'b"\n', "ü"], ["a", "abb"]),
    (Ebnf('root ::= "a" | "(" root ")" # nested\n'), ["a", "(a)"], ["(a", ")"]),
]


@pytest.mark.parametrize(("form", "taken", "refused"), FORMS, ids=lambda value: type(value).__name__)
def test_a_form_takes_its_texts_and_no_others(
    compiled: Compiled, form: Form, taken: list[str], refused: list[str]
) -> None:
    assert [text for text in taken if not compiled.takes(form, text)] == []
    assert [text for text in refused if compiled.takes(form, text)] == []


def test_matching_goes_back_exactly(compiled: Compiled) -> None:
    matcher = compiled.grammar(JsonSchema(WEATHER.schema)).matcher()
    seen = [compiled.allowed(matcher)]
    ids = compiled.ids('{"city": "Bern", "unit": "f"}')
    for token_id in ids:
        assert matcher.accept(token_id)
        seen.append(compiled.allowed(matcher))
    for back in range(1, len(ids) + 1):
        matcher.rollback(back)
        assert compiled.allowed(matcher) == seen[len(ids) - back]
        for token_id in ids[len(ids) - back :]:
            assert matcher.accept(token_id)
    assert compiled.allowed(matcher) == seen[-1]


def calls(tokenizer: Tokenizer, most_calls: int = 2) -> ToolCalls:
    tokens = CallTokens.of(tokenizer.control_tokens)
    assert tokens is not None
    return ToolCalls((WEATHER, Tool("my-tool", '{"type": "object"}')), tokens, 3, most_calls)


def envelope(*inner: str) -> str:
    whole = (
        f"<|tool_call_begin|>{text.replace('|', '<|tool_call_argument_begin|>')}<|tool_call_end|>" for text in inner
    )
    return f"<|tool_calls_section_begin|>{''.join(whole)}<|tool_calls_section_end|>"


def test_calls_are_kimis_envelope_with_numbers_that_count_on(nano: Compiled) -> None:
    form = calls(nano.tokenizer)
    weather, mine = 'functions.get_weather:3|{"city": "B"}', 'functions.my-tool:4|{"x": [1]}'
    assert nano.takes(form, envelope(weather))
    assert nano.takes(form, envelope(weather, mine))
    for wrong in (
        envelope(),
        envelope(mine),
        envelope('functions.get_weather:3|{"unit": "c"}'),
        envelope('functions.my-tool:3|{"x": ["<|tool_call_end|>"]}'),
        envelope(weather, mine, mine.replace("4", "5")),
        f"x{envelope(weather)}",
    ):
        assert not nano.takes(form, wrong), wrong


def test_what_is_forced_is_said(nano: Compiled) -> None:
    matcher = nano.grammar(JsonSchema(WEATHER.schema)).matcher()
    assert matcher.accept(nano.ids("{")[0])
    said = []
    while (token_id := nano.forced(matcher)) is not None:
        said.append(token_id)
        assert matcher.accept(token_id)
    assert nano.tokenizer.decode(said) == '"city":'


@pytest.mark.parametrize(("num_words", "forced"), [(1, 0), (16, 15 * 32), (17, None)])
def test_masks_of_seventeen_words_and_more_force_nothing(num_words: int, forced: int | None) -> None:
    """One token in each word, all of them beginnings of the longest: looking at every mask's tokens would take long."""
    texts = [b""] * (32 * num_words)
    texts[::32] = [b"a" * (number + 1) for number in range(num_words)]
    matcher = XgrammarMatcher(XgrammarVocabulary(texts, len(texts), []), None)
    assert matcher.forced(np.ones(num_words, np.int32)) == forced


def test_what_is_forced_without_an_end_is_said_token_by_token(nano: Compiled) -> None:
    """A library that follows it to its end takes all memory."""
    endless = JsonSchema('{"type": "object", "properties": {"n": {"$ref": "#"}}, "required": ["n"]}')
    doubled = Ebnf("\n".join(["root ::= r0", *(f"r{i} ::= r{i + 1} r{i + 1}" for i in range(40)), 'r40 ::= "ab"']))
    for form, text in ((endless, '{"n": {"n": {"n": '), (doubled, "ababababab")):
        grammar = SequenceGrammar.of(Grammar(form, "f"), nano.grammar(form), frozenset(nano.tokenizer.eos_token_ids))
        window = grammar.look_ahead([], 7)
        assert len(window.token_ids) == window.num_forced == 7
        assert nano.tokenizer.decode(window.token_ids)[:8] == text[:8]


def test_no_token_makes_a_text_that_is_not_unicode(nano: Compiled) -> None:
    """A pattern of any character would let bytes come that spell none."""
    by_byte = {nano.tokenizer.token_bytes(i): i for i in range(nano.tokenizer.vocab_size)}
    matcher = nano.grammar(JsonSchema('{"type": "string", "pattern": "^[^b]$"}')).matcher()
    assert matcher.accept(by_byte[b'"'])
    for lead, wrong, right in ((0xE0, 0x80, 0xA4), (0xED, 0xA0, 0x80), (0xF0, 0x80, 0x9F), (0xF4, 0x90, 0x80)):
        assert matcher.accept(by_byte[bytes([lead])])
        allowed = nano.allowed(matcher)
        assert by_byte[bytes([wrong])] not in allowed
        assert by_byte[bytes([right])] in allowed
        matcher.rollback(1)


@pytest.mark.parametrize(
    ("form", "message"),
    [
        (Regex("[a"), "f: Regex parsing error at position 3: Unclosed"),
        (Ebnf('root ::= "a"\nb ::= c'), 'f: EBNF parser error at line 2, column 7: Rule "c" is not defined'),
        (Ebnf('root ::= "a"\n b ::= Token(3842)'), r"f: line 2: Token\(\.\.\.\): rules, strings and"),
        (JsonSchema('{"oneOf": [{"type": "integer"}, {"type": "number"}]}'), "f: oneOf with overlapping"),
        (JsonSchema('{"type": "number", "multipleOf": 0.5}'), "f: multipleOf is not supported for type:number"),
    ],
)
def test_what_is_no_grammar_is_refused(nano: Compiled, form: Form, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"^{message}"):
        nano.grammar(form)


def test_what_is_compiled_is_kept_until_others_need_the_room() -> None:
    tokenizer = tempting_tokenizer()
    compiler = GrammarCompiler(tokenizer, CompileLimits(most_cached_bytes=6000, num_processes=1))

    def get(text: str) -> CompiledGrammar:
        return compiler.request(Grammar(Choice((text,)), "f"), tokenizer.vocab_size).result(PATIENCE_S)

    try:
        first = get("a")
        assert get("a") is first
        for text in map(str, range(40)):
            get(text)
        assert get("a") is not first
    finally:
        compiler.close()


LEFT = """
import sys
from pathlib import Path
from kimi_backend.grammar.compiler import CompileLimits, GrammarCompiler
from kimi_backend.text.tokenizer import load_tokenizer
from kimi_backend.types.grammar import Grammar, Regex

compiler = GrammarCompiler(load_tokenizer(sys.argv[1]), CompileLimits(timeout_s=float(sys.argv[2])))

def resident_bytes_with(pattern):
    compiler.request(Grammar(Regex(pattern), "f"), 4096).result()
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

before = resident_bytes_with("a")
print(resident_bytes_with("(a{1,950}){1,950}") - before)
compiler.close()
"""


def test_the_memory_that_reading_a_large_one_takes_goes_back() -> None:
    done = subprocess.run([sys.executable, "-c", LEFT, str(NANO), str(PATIENCE_S)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 16 * MIB, "it would be 36 MiB"


def test_a_grammar_is_ended_that_takes_too_much() -> None:
    tokenizer = load_tokenizer(NANO)
    compiler = GrammarCompiler(tokenizer, CompileLimits(timeout_s=PATIENCE_S, most_bytes=200 * MIB))
    try:
        with pytest.raises(InvalidRequestError, match=r"^f: compiling it takes more than the 200 MiB of memory"):
            compiler.request(Grammar(VAST, "f"), tokenizer.vocab_size).result(PATIENCE_S)
        compiler.request(Grammar(Choice(("b",)), "f"), tokenizer.vocab_size).result(PATIENCE_S)
    finally:
        compiler.close()


def ask(compiler: GrammarCompiler, form: Form, tokenizer: Tokenizer, name: str = "f") -> "Future[CompiledGrammar]":
    return compiler.request(Grammar(form, name), tokenizer.vocab_size)


def test_the_limits_are_those_of_the_page() -> None:
    limits, page = CompileLimits(), NANO.parents[1] / "docs" / "structured_output.md"
    words = {1: "one", 2: "two"}
    said = f"{limits.first_try_s:g} s of processor time in one of {words[limits.num_processes]} processes of their own"
    bounds = f"then {limits.timeout_s:g} s in a third; {limits.most_bytes // 2**30} GiB"
    assert f"{said}, {bounds}" in page.read_text()


def test_a_grammar_is_ended_that_takes_too_long() -> None:
    """Others go on meanwhile, the process that ended is replaced, and each request hears of its own field."""
    tokenizer = load_tokenizer(NANO)
    compiler = GrammarCompiler(tokenizer, CompileLimits(first_try_s=0.5, timeout_s=1.5))
    try:
        asked_first, again = ask(compiler, ENDLESS, tokenizer), ask(compiler, ENDLESS, tokenizer, "g")
        ask(compiler, Choice(("a",)), tokenizer).result(PATIENCE_S)
        for asked, name in ((asked_first, "f"), (again, "g")):
            with pytest.raises(InvalidRequestError, match=f"^{name}: compiling it takes longer than the 1.5 s"):
                asked.result(PATIENCE_S)
        for text in ("b", "c", "d"):
            ask(compiler, Choice((text,)), tokenizer).result(PATIENCE_S)
    finally:
        compiler.close()


def test_grammars_that_take_long_make_room_for_others() -> None:
    """There are more of them than processes, and a quick one waits for their first tries only."""
    tokenizer = load_tokenizer(NANO)
    compiler = GrammarCompiler(tokenizer, CompileLimits(first_try_s=0.5, timeout_s=2 * PATIENCE_S))
    try:
        slow = [ask(compiler, endless(letter), tokenizer) for letter in "xyz"]
        ask(compiler, Choice(("a",)), tokenizer).result(PATIENCE_S)
        assert not any(future.done() for future in slow)
    finally:
        compiler.close()
    assert all(isinstance(future.exception(0), InvalidRequestError) for future in slow)


def test_what_takes_longer_than_a_first_try_is_compiled() -> None:
    tokenizer = load_tokenizer(NANO)
    compiler = GrammarCompiler(tokenizer, CompileLimits(first_try_s=0.01, timeout_s=PATIENCE_S))
    try:
        words = Choice(tuple(f"k{i}" for i in range(2000)))
        assert ask(compiler, words, tokenizer).result(PATIENCE_S) is ask(compiler, words, tokenizer).result(0)
    finally:
        compiler.close()


def test_what_nobody_waits_for_is_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients that leave before their turn take none; one of several who stays is enough."""
    tokenizer = load_tokenizer(NANO)
    compiler = GrammarCompiler(tokenizer, CompileLimits(first_try_s=1, timeout_s=1, num_processes=1))
    lane, tried = compiler._first_tries, []
    compile_form = lane.compile
    monkeypatch.setattr(lane, "compile", lambda form, vocabulary: tried.append(form) or compile_form(form, vocabulary))
    left, kept = Choice(("left",)), Choice(("kept",))
    try:
        ask(compiler, ENDLESS, tokenizer)
        for form in (left, kept):
            assert ask(compiler, form, tokenizer).cancel()
        stays = ask(compiler, kept, tokenizer)
        stays.result(PATIENCE_S)
        assert tried == [ENDLESS, kept]
        ask(compiler, left, tokenizer).result(PATIENCE_S)
    finally:
        compiler.close()


def test_closing_ends_what_compiles() -> None:
    tokenizer = load_tokenizer(NANO)
    compiler = GrammarCompiler(tokenizer, CompileLimits(first_try_s=2 * PATIENCE_S, timeout_s=2 * PATIENCE_S))
    endless = compiler.request(Grammar(ENDLESS, "f"), tokenizer.vocab_size)
    compiler.request(Grammar(Choice(("a",)), "f"), tokenizer.vocab_size).result(PATIENCE_S)
    start = time.monotonic()
    compiler.close()
    assert time.monotonic() - start < PATIENCE_S
    with pytest.raises(InvalidRequestError):
        endless.result(0)
    with pytest.raises(CapacityError):
        compiler.request(Grammar(Choice(("a",)), "f"), tokenizer.vocab_size)


def test_neither_torch_nor_transformers_is_imported() -> None:
    code = (
        "import sys, kimi_backend.grammar.compiler;"
        "print([name for name in ('torch', 'transformers', 'triton') if name in sys.modules])"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
