"""Texts that a Kimi model wrote or could write, and what a reader of replies should make of them.

`expected` has (reasoning, content, calls); a call is (id, name, arguments), with a fourth element, False, where it is
incomplete. Text between « and » is spelled: its markers are letters and no control tokens.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any

SB, SE = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
B, A, E = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
SB1, SE1 = "«<|tool_call_section_begin|>»", "«<|tool_call_section_end|>»"
"""Markers in the singular: the vocabulary has no token for them."""
CONTROLS = ("<think>", "</think>", SB, SE, B, A, E)
_CONTROL = re.compile("|".join(map(re.escape, CONTROLS)))

NAMES = ("a", "b", "exec", "get_weather", "read_file", "a.b.c.func", "my-tool", "functions_x")
SCHEMAS = {
    "a": {"properties": {"x": {}, "deep": {}}, "required": ["x"]},
    "b": {"properties": {"y": {}}, "required": ["y"]},
    "get_weather": {"properties": {"city": {}, "unit": {}}, "required": ["city"]},
}
TOOLS = [{"type": "function", "function": {"name": n, "parameters": SCHEMAS.get(n, {})}} for n in NAMES]

Call = tuple[Any, ...]


@dataclass(frozen=True)
class ReplyText:
    name: str
    marked: str
    reasoning: str = ""
    content: str = ""
    calls: tuple[Call, ...] = ()
    thinks: bool = False
    is_one_enough: bool = False
    splits: bool = True
    messages: list[Any] = field(default_factory=list)

    @property
    def expected(self) -> tuple[str, str, tuple[Call, ...]]:
        return self.reasoning, self.content, tuple((*call, True) if len(call) == 3 else call for call in self.calls)

    def place(self) -> tuple[str, tuple[int, ...]]:
        """The text as a client gets it, and the offsets of its control tokens."""
        return place_controls(self.marked)


def place_controls(marked: str) -> tuple[str, tuple[int, ...]]:
    """A text without « and », and the offsets of the markers outside of them."""
    text, offsets = "", []
    for index, piece in enumerate(re.split("[«»]", marked)):
        if index % 2 == 0:
            offsets += [len(text) + found.start() for found in _CONTROL.finditer(piece)]
        text += piece
    return text, tuple(offsets)


def call(call_id: str = "functions.a:0", arguments: str = '{"x": 1}') -> str:
    return B + call_id + A + arguments + E


X, Y = '{"x": 1}', '{"y": "2"}'
CALL_A = ("functions.a:0", "a", X)
CALL_B = ("functions.b:1", "b", Y)
AB = call() + call("functions.b:1", Y)
NESTED = '{"x": {"a": [1, {"b": "}"}], "c": {}}, "deep": "{[\\"\\\\"}'
UNICODE = '{"x": "ü🙂中\\u00e9\\n\\t \u2028"}'
HISTORY = [
    {"role": "assistant", "tool_calls": [{"id": "call_xyz", "function": {"name": "exec", "arguments": "{}"}}]},
    {"role": "tool", "tool_call_id": "call_xyz", "content": "ok"},
    {"role": "assistant", "tool_calls": [{"id": "functions.a:4", "function": {"name": "a", "arguments": "{}"}}]},
]


def arguments_of(num_chars: int) -> str:
    return json.dumps({"x": 'line "quoted" {brace} \\ ü\n' * (num_chars // 28)}, ensure_ascii=False)


def one(name: str, marked: str, arguments: str = X, tool: str = "a", **more: Any) -> ReplyText:
    """A text whose only call is the conversation's first."""
    return ReplyText(name, marked, calls=((f"functions.{tool}:0", tool, arguments),), **more)


TEXTS = (
    # The form that the model was trained on.
    ReplyText("no call", "Hello.", content="Hello."),
    ReplyText("empty", ""),
    one("one call", SB + call() + SE),
    ReplyText("two calls", SB + AB + SE, calls=(CALL_A, CALL_B)),
    one("text before the section", "Let me check." + SB + call() + SE, content="Let me check."),
    ReplyText("two sections", f"{SB}{call()}{SE}{SB}{call('functions.b:1', Y)}{SE}", calls=(CALL_A, CALL_B)),
    one("text behind the section", f"{SB}{call()}{SE}Done.", content="Done."),
    one("blanks around the section", f"\n\n{SB}{call()}{SE}\n"),
    one("blanks around id and arguments", f"{SB}\n{B} functions.a:0 {A}\n {X} \n{E}\n{SE}"),
    # Sections.
    one("no section markers", call()),
    ReplyText("no section markers, two calls", AB, calls=(CALL_A, CALL_B)),
    one("a section's end only", call() + SE),
    one("a section's beginning only", SB + call()),
    one("singular section markers", SB1 + call() + SE1),
    one("singular section markers, text behind", SB1 + call() + SE1 + "Done.", content="Done."),
    one("text between section and call", f"{SB}.{call()}{SE}"),
    ReplyText("text between calls", f"{SB}{call()} junk {call('functions.b:1', Y)}{SE}", calls=(CALL_A, CALL_B)),
    one("text between the last call and the section's end", f"{SB}{call()} junk {SE}"),
    one("a section's beginning twice", SB + SB + call() + SE),
    ReplyText("a section without a call", f"T.{SB}{SE}", content="T."),
    ReplyText("a section of text", f"T. {SB}no call{SE} U.", content="T. no call U."),
    ReplyText("a section of text, not ended", f"T. {SB}no call", content="T. no call"),
    ReplyText("a section's end alone", f"T.{SE}", content="T."),
    # A call's ends.
    one("a section's beginning in place of a call's end", f'{SB}{B}functions.a:0{A}{{"x": 1{SB}', '{"x": 1'),
    one("no end of a call before the section's end", f"{SB}{B}functions.a:0{A}{X}{SE}"),
    ReplyText(
        "no end of a call before the next",
        f"{SB}{B}functions.a:0{A}{X}{call('functions.b:1', Y)}{SE}",
        calls=(CALL_A, CALL_B),
    ),
    one("no end of a call at the reply's end", f"{SB}{B}functions.a:0{A}{X}"),
    one("no end of a call before a singular section's end", f"{SB1}{B}functions.a:0{A}{X}{SE1}"),
    one("a call's end twice", f"{SB}{call()}{E}{SE}"),
    one("no marker before the arguments", f"{SB}{B}functions.a:0{X}{E}{SE}"),
    one("no arguments and no marker before them", f"{SB}{B}functions.a:0{E}{SE}", "{}"),
    one("a beginning without a call", f"{SB}{B}functions.b{call()}{SE}"),
    one("text behind the object", f"{SB}{B}functions.a:0{A}{X} trailing{E}{SE}"),
    # Markers that are letters.
    one("an end marker spelled inside a string", SB + call(arguments=f'{{"x": "«{E}»"}}') + SE, f'{{"x": "{E}"}}'),
    one("a section's end spelled inside a string", SB + call(arguments=f'{{"x": "«{SE}»"}}') + SE, f'{{"x": "{SE}"}}'),
    one(
        "a whole section spelled inside a string",
        SB + call(arguments=f'{{"x": "«{SB}{call("functions.b:0", "{}")}{SE}»"}}') + SE,
        f'{{"x": "{SB}{call("functions.b:0", "{}")}{SE}"}}',
    ),
    one("a think marker spelled inside a string", SB + call(arguments='{"x": "«</think>»"}') + SE, '{"x": "</think>"}'),
    one("a think token inside a string", SB + call(arguments='{"x": "</think>"}') + SE, '{"x": "</think>"}'),
    ReplyText("a section marker spelled in prose", f"Kimi writes «{SB}» before.", content=f"Kimi writes {SB} before."),
    ReplyText("a section marker spelled at the end", f"It is «{SB}»", content=f"It is {SB}"),
    ReplyText("all markers spelled in prose", f"«{SB}{AB}{SE}»", content=SB + AB + SE),
    one("a spelled section marker before a call", f"«{SB}»\n{call()}{SE}"),
    one("prose about markers, then a call", f"«{SB}» it is.{SB}{call()}{SE}", content=f"{SB} it is."),
    ReplyText("the beginning of a marker in prose", "a <|tool_call b <thin <", content="a <|tool_call b <thin <"),
    # Arguments.
    one("nested arguments", SB + call(arguments=NESTED) + SE, NESTED),
    one("letters of all kinds", SB + call(arguments=UNICODE) + SE, UNICODE),
    one("arguments of 9 KB", SB + call(arguments=arguments_of(9_000)) + SE, arguments_of(9_000)),
    one("empty arguments", SB + call(arguments="") + SE, "{}"),
    one("blank arguments", SB + call(arguments=" \n") + SE, "{}"),
    one("an empty object", SB + call(arguments="{}") + SE, "{}"),
    one("arguments that are a JSON string", SB + call(arguments=json.dumps(X)) + SE),
    one("an empty JSON string", SB + call(arguments='""') + SE, "{}"),
    one(
        "a JSON string in a JSON string", SB + call(arguments=json.dumps(json.dumps(X))) + SE, json.dumps(json.dumps(X))
    ),
    one("arguments that are no object", SB + call(arguments=" [1, 2] ") + SE, "[1, 2]"),
    one("arguments that are null", SB + call(arguments="null") + SE, "null"),
    one("arguments that are no JSON", SB + call(arguments='{"x": }') + SE, '{"x": }'),
    one("a call that ends inside a string", SB + call(arguments='{"x": "a') + SE, '{"x": "a'),
    # Names and ids.
    one("a newline inside the id", SB + call("functions.a\n:0") + SE),
    one("an id without a prefix", SB + call("get_weather:0") + SE, tool="get_weather"),
    one("an id with underscores", SB + call("functions_get_weather_1") + SE, tool="get_weather"),
    one("an id without separators", SB + call("functionsexec5") + SE, tool="exec"),
    one("a name alone", SB + call("get_weather") + SE, tool="get_weather"),
    one("a name with its prefix alone", SB + call("functions.exec") + SE, tool="exec"),
    one("dots in a name", SB + call("functions.a.b.c.func:1") + SE, tool="a.b.c.func"),
    one("dots in a name without a prefix", SB + call("a.b.c.func:1") + SE, tool="a.b.c.func"),
    one("a hyphen in a name", SB + call("functions.my-tool:2") + SE, tool="my-tool"),
    one("a name that begins like a prefix", SB + call("functions_x:0") + SE, tool="functions_x"),
    one("a number alone", SB + call("3") + SE),
    one("a foreign id", SB + call("call_abc", '{"city": "Rome"}') + SE, '{"city": "Rome"}', tool="get_weather"),
    ReplyText("a number that fits no tool", SB + call("3", '{"q": 1}') + SE, content='3{"q": 1}'),
    ReplyText(
        "a number, and too few arguments for any tool", SB + call("3", '{"unit": "C"}') + SE, content='3{"unit": "C"}'
    ),
    ReplyText("an undeclared name", SB + call("functions.nosuch:0") + SE, content=f"functions.nosuch:0{X}"),
    one("an undeclared name before a declared one", SB + call("nosuch:0") + call() + SE, content=f"nosuch:0{X}"),
    ReplyText(
        "the same id twice",
        SB + call() + call(arguments=Y) + SE,
        calls=(CALL_A, ("functions.a:1", "a", Y)),
    ),
    ReplyText(
        "ids go on from the history",
        SB + call() + SE,
        calls=(("functions.a:5", "a", X),),
        messages=HISTORY,
    ),
    ReplyText(
        "an id of the history again",
        SB + call("call_xyz") + SE,
        calls=(("functions.exec:5", "exec", X),),
        messages=HISTORY,
    ),
    one("one call is enough", f"Hm. {SB}{AB}{SE}Bye.", content="Hm. ", is_one_enough=True),
    # Thoughts.
    ReplyText("thoughts and an answer", "hm</think>Hello", "hm", "Hello", thinks=True),
    ReplyText("only thoughts", "hm</think>", "hm", thinks=True),
    ReplyText("thoughts cut off", "hm, so", "hm, so", thinks=True),
    ReplyText("thoughts cut off in what looks like a marker", "hm</thin", "hm</thin", thinks=True),
    ReplyText("no thoughts", "</think>Hello", content="Hello", thinks=True),
    ReplyText("an empty think block", "<think></think>Hello", content="Hello", thinks=True),
    ReplyText("a think block that the prompt did not begin", "<think>hm</think>Hello", "hm", "Hello"),
    ReplyText("a think block that is spelled", "«<think>»hm«</think>»", content="<think>hm</think>"),
    ReplyText("an end of thoughts spelled in them", "a «</think>» b</think>c", "a </think> b", "c", thinks=True),
    ReplyText("an end of thoughts in the content", "hm</think>a</think>b", "hm", "ab", thinks=True),
    ReplyText("thoughts in the content, as asked", "hm</think>a", content="hm</think>a", thinks=True, splits=False),
    ReplyText(
        "thoughts that mention a section marker",
        f"I could write «{SB}» but no.</think>Hello",
        f"I could write {SB} but no.",
        "Hello",
        thinks=True,
    ),
    one("a call behind thoughts", f"hm</think>{SB}{call()}{SE}", reasoning="hm", thinks=True),
    one("a section inside thoughts", f"hm{SB}{call()}{SE}", reasoning="hm", thinks=True),
    one("a call inside thoughts", f"hm{call()}", reasoning="hm", thinks=True),
    one("text behind a section inside thoughts", f"hm{SB}{call()}{SE}Hi", reasoning="hm", content="Hi", thinks=True),
    one(
        "thoughts that go on behind a section",
        f"hm{SB}{call()}{SE}more</think>Hello",
        reasoning="hmmore",
        content="Hello",
        thinks=True,
    ),
    ReplyText(
        "two sections inside thoughts",
        f"hm{SB}{call()}{SE} so{SB}{call('functions.b:0', Y)}{SE}</think>Hi",
        "hm so",
        "Hi",
        (CALL_A, CALL_B),
        thinks=True,
    ),
    ReplyText("a section without a call in thoughts", f"hm{SB}</think>Hi", "hm", "Hi", thinks=True),
    # Cut off by max_tokens.
    ReplyText("cut off behind the section marker", f"T.{SB}", content="T."),
    ReplyText("cut off behind a call's beginning", f"T.{SB}{B}", content="T."),
    ReplyText("cut off inside the id", f"T.{SB}{B}functions.a", content="T."),
    ReplyText("cut off before the arguments", f"T.{SB}{B}functions.a:0{A}", content="T."),
    ReplyText(
        "cut off inside the arguments",
        f'T.{SB}{B}functions.a:0{A}{{"x": "ab',
        content="T.",
        calls=(("functions.a:0", "a", '{"x": "ab', False),),
    ),
    ReplyText(
        "cut off inside the second call",
        f'{SB}{call()}{B}functions.b:1{A}{{"y"',
        calls=(CALL_A, ("functions.b:1", "b", '{"y"', False)),
    ),
    ReplyText("cut off inside arguments that are a JSON string", f'{SB}{B}functions.a:0{A}"{{\\"x', calls=()),
    ReplyText("cut off inside a call without a name", f'{SB}{B}3{A}{{"x": 1', calls=()),
    # Drafts stood behind the end in its verify window; the engine hands none of them on.
    one("an end of sequence inside the window", f"{SB}{call()}"),
    one("cut off behind the arguments", f"{SB}{B}functions.a:0{A}{X}"),
)
