"""Forms of replies as one grammar text in the library's EBNF. Runs in the process that compiles."""

import re
from functools import singledispatch
from typing import Any

from kimi_backend.grammar.library import GrammarText
from kimi_backend.types.grammar import Choice, Ebnf, Either, JsonSchema, Regex, ToolCalls

ROOT = "root"
_SEPARATORS = [", ", ": "]
"""The separators that `json.dumps` writes, and Kimi's template: one spelling, so that much of a text is forced."""
_ANY_CHARACTER, _STRING_CHARACTER = r"[^\"\\\r\n]", r"[^\0-\x1f\"\\\r\n]"
"""The characters of a string of limited length: the library's, control characters too, and JSON's."""
_LEXEME = re.compile(r'"(?:\\.|[^"\\])*"|\[(?:\\.|[^\]\\])*\]|#[^\n]*|[A-Za-z_][A-Za-z0-9_.-]*')
_ESCAPE = re.compile(r"\\(?:x([0-9A-Fa-f]{2})|.)")
_CALL = re.compile(r"\s*\(")
_RULE = re.compile(r"^\s*([A-Za-z_][A-Za-z0-9_.-]*)\s*::=", re.MULTILINE)


@singledispatch
def ebnf_of(form: object) -> str:
    """The grammar text of a form, whose first rule is `root`.

    Raises:
        LibraryError: the form is none; says why, not where.
    """
    raise TypeError(f"{form!r} is no form")


@ebnf_of.register
def _(form: JsonSchema) -> str:
    # Whitespace as given, no indentation, names that no schema has are none, nothing printed, properties in order.
    grammar = GrammarText.from_json_schema(form.schema, False, None, _SEPARATORS, True, None, False, False)
    return _printed(grammar).replace(_ANY_CHARACTER, _STRING_CHARACTER)


@ebnf_of.register
def _(form: Regex) -> str:
    return _printed(GrammarText.from_regex(form.pattern, False))


@ebnf_of.register
def _(form: Choice) -> str:
    return f"{ROOT} ::= {' | '.join(map(quoted, form.texts))}"


@ebnf_of.register
def _(form: Ebnf) -> str:
    """A client's grammar is of letters: what the library can do with tokens and with nested grammars stays ours."""
    for found in _LEXEME.finditer(form.text):
        if found[0][0] not in '"[#' and _CALL.match(form.text, found.end()):
            line = form.text.count("\n", 0, found.start()) + 1
            raise ValueError(f"line {line}: {found[0][:40]}(...): rules, strings and character classes are allowed")
    return form.text


@ebnf_of.register
def _(form: ToolCalls) -> str:
    """A rule a call, since each has its own number; a rule a tool's arguments, which all calls share."""
    tokens, parts, rules = form.tokens, [], []
    for index, tool in enumerate(form.tools):
        rules.append(_renamed(ebnf_of(JsonSchema(tool.schema)), _prefix(index)))
    for place in range(form.most_calls):
        number = form.first_number + place
        calls = " | ".join(
            f"{quoted(f'functions.{tool.name}:{number}')} Token({tokens.arguments_begin}) {_prefix(index)}{ROOT}"
            for index, tool in enumerate(form.tools)
        )
        is_last = place + 1 == form.most_calls
        following = "" if is_last else f' ("" | call_{place + 1})'
        parts.append(f"call_{place} ::= Token({tokens.call_begin}) ({calls}) Token({tokens.call_end}){following}")
    begin = "" if form.is_section_begun else f"Token({tokens.section_begin}) "
    return "\n".join([f"{ROOT} ::= {begin}call_0 Token({tokens.section_end})", *parts, *rules])


@ebnf_of.register
def _(form: Either) -> str:
    texts = [_renamed(ebnf_of(inner), _prefix(index)) for index, inner in enumerate(form.forms)]
    return "\n".join([f"{ROOT} ::= {' | '.join(f'{_prefix(index)}{ROOT}' for index in range(len(texts)))}", *texts])


def _printed(grammar: Any) -> str:
    """The text of a grammar, so that it is read as what it was: the library prints two digits of a letter's code behind
    \\x, and reads as many as follow."""
    return _ESCAPE.sub(lambda found: f"\\u00{found[1]}" if found[1] else found[0], str(grammar.to_string()))


def _prefix(index: int) -> str:
    return f"part_{index}_"


def _renamed(text: str, prefix: str) -> str:
    """A grammar whose rules stand beside those of others."""
    names = set(_RULE.findall(text))
    return _LEXEME.sub(lambda found: f"{prefix}{found[0]}" if found[0] in names else found[0], text)


def quoted(text: str) -> str:
    """A text as a string of the grammar."""
    return '"' + "".join(map(_escaped, text)) + '"'


def _escaped(char: str) -> str:
    if char in '"\\':
        return f"\\{char}"
    return char if char.isprintable() and char.isascii() else f"\\U{ord(char):08x}"
