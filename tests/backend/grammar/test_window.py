"""A verify of a sequence with a grammar checks draft tokens that fit, with a mask for each row; the matcher stays."""

from collections.abc import Iterator

import numpy as np
import pytest

from kimi_backend.grammar.compiler import GrammarCompiler
from kimi_backend.grammar.window import SequenceGrammar
from kimi_backend.text.tokenizer import Tokenizer
from kimi_backend.types.grammar import Choice, Ebnf, Grammar
from kimi_backend.types.plan import Int32Array
from support.tiny_tokenizers import tempting_tokenizer

TOKENIZER = tempting_tokenizer()
END = frozenset(TOKENIZER.eos_token_ids)
THINK_END = TOKENIZER.control_tokens["</think>"]


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    made = GrammarCompiler(TOKENIZER)
    yield made
    made.close()


def sequence_grammar(compiler: GrammarCompiler, *texts: str, **changes: object) -> SequenceGrammar:
    grammar = Grammar(Choice(texts), "f", **changes)  # type: ignore[arg-type]
    return SequenceGrammar.of(grammar, compiler.request(grammar, TOKENIZER.vocab_size).result(60), END)


def letters(tokenizer: Tokenizer, text: str) -> list[int]:
    """Tokens of one letter each."""
    return [tokenizer.encode(letter)[0] for letter in text]


def allowed(mask: Int32Array | None) -> set[bytes]:
    assert mask is not None
    ids = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()
    return {TOKENIZER.token_bytes(token_id) for token_id in ids}


def test_the_drafts_proposals_are_taken_while_they_fit(compiler: GrammarCompiler) -> None:
    grammar = sequence_grammar(compiler, "abab", "baba")
    window = grammar.look_ahead(letters(TOKENIZER, "1b"), 3)
    assert (window.token_ids, len(window.masks), window.num_forced, window.num_drafted) == ([], 1, 0, 2)
    first = allowed(window.masks[0])
    assert {b"a", b"b", b"ab", b"ba"} <= first
    window = grammar.look_ahead(letters(TOKENIZER, "b"), 3)
    assert TOKENIZER.decode(window.token_ids) == "baba"[: len(TOKENIZER.decode(window.token_ids))]
    assert window.token_ids[0] == letters(TOKENIZER, "b")[0]
    assert allowed(window.masks[0]) == first, "the matcher is where it was"
    assert allowed(grammar.look_ahead([], 0).masks[0]) == first


def test_what_is_forced_needs_no_draft(compiler: GrammarCompiler) -> None:
    grammar = sequence_grammar(compiler, "tab12tab")
    window = grammar.look_ahead([], 7)
    assert TOKENIZER.decode(window.token_ids) == "tab12tab"
    assert window.num_forced == len(window.token_ids) == len(window.masks) - 1
    assert window.num_drafted == 0
    assert allowed(window.masks[-1]) == {TOKENIZER.token_bytes(token_id) for token_id in END}, "only the end is left"
    assert grammar.look_ahead(letters(TOKENIZER, "1"), 2).token_ids == window.token_ids[:2], "the draft is wrong there"
    right = grammar.look_ahead(window.token_ids, 7)
    assert (right.token_ids, right.num_forced) == (window.token_ids, 0), "the draft said it as well"


def test_the_end_is_never_proposed(compiler: GrammarCompiler) -> None:
    grammar = sequence_grammar(compiler, "a")
    end = min(END)
    window = grammar.look_ahead([letters(TOKENIZER, "a")[0], end, end, end], 4)
    assert window.token_ids == letters(TOKENIZER, "a")
    assert grammar.advance([*window.token_ids, end])


def test_a_token_that_does_not_fit_is_noticed(compiler: GrammarCompiler) -> None:
    grammar = sequence_grammar(compiler, "ab")
    assert not grammar.advance(letters(TOKENIZER, "b"))


@pytest.mark.parametrize("must_begin", [True, False])
def test_it_begins_behind_its_token_and_once(compiler: GrammarCompiler, must_begin: bool) -> None:
    grammar = sequence_grammar(compiler, "ab", begins_after=THINK_END, must_begin=must_begin)
    thoughts = letters(TOKENIZER, "t1")
    window = grammar.look_ahead([*thoughts, THINK_END, *letters(TOKENIZER, "a"), THINK_END], 7)
    assert window.token_ids[:3] == [*thoughts, THINK_END]
    assert TOKENIZER.decode(window.token_ids[3:]) in ("a", "ab")
    assert allowed(window.masks[3]) == {b"a", b"ab"}
    if must_begin:
        before = allowed(window.masks[0])
        assert {b"t", b"</think>"} <= before
        assert not before & {TOKENIZER.token_bytes(token_id) for token_id in END}
        assert b"<|tool_call_begin|>" not in before
    else:
        assert window.masks[:3] == [None, None, None]
    assert grammar.advance(thoughts)
    assert not grammar.is_begun
    assert grammar.advance([THINK_END, *letters(TOKENIZER, "a")])
    assert not grammar.advance([THINK_END])


def test_one_that_takes_too_long_is_noticed(compiler: GrammarCompiler) -> None:
    """Every token of such a text may be read in more ways than the one before it."""
    grammar = Grammar(Ebnf('root ::= x*\nx ::= y y | ""\ny ::= x "a" x | "a"'), "f")
    slow = SequenceGrammar.of(grammar, compiler.request(grammar, TOKENIZER.vocab_size).result(60), END)
    quick = sequence_grammar(compiler, "a" * 400)
    slow._left_s = 0.1  # of 0.5, to be quick
    for _ in range(400):
        for each in (slow, quick):
            each.look_ahead([], 0)
            assert each.advance(letters(TOKENIZER, "a"))
        assert not quick.is_too_slow
        if slow.is_too_slow:
            return
    raise AssertionError("nobody noticed")
