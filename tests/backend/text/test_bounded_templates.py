"""Hostile templates end soon, with a refusal; the checkpoints' own do not notice the bounds."""

import resource
import time
from pathlib import Path

import pytest

from kimi_backend.errors import CheckpointError, InvalidRequestError
from kimi_backend.text.chat_template import ChatTemplate, load_chat_template
from kimi_backend.text.tiktoken_files import kimi_chat_template
from support.tiny_tokenizers import tempting_tokenizer

USER = [{"role": "user", "content": "hello"}]
LONGEST_S = 5.0
"""The limit on a machine that others use too; it takes a second."""
DOUBLING = "{% set ns = namespace(a=START) %}{% for i in range(60) %}{% set ns.a = DOUBLED %}{% endfor %}"


def doubling(start: str, doubled: str, then: str = "") -> str:
    return DOUBLING.replace("START", start).replace("DOUBLED", doubled) + then


MACRO = "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}"
LOOPS = "{% for i in range(99999) %}{% for j in range(99999) %}BODY{% endfor %}{% endfor %}"
DEEP = ["{% if x %}" * 30_000, "{{ " + "(" * 30_000, "{% for a in b %}" * 60 + "{% endfor %}" * 60]
HOSTILE = {
    "loops in loops": LOOPS.replace("BODY", ""),
    "loops in loops that write": LOOPS.replace("BODY", "xxxxxxxx"),
    "a macro that calls itself twice": MACRO,
    "strings that double by ~": doubling("'ab'", "ns.a ~ ns.a"),
    "strings that double by +": doubling("'ab'", "ns.a + ns.a"),
    "strings that double by join": doubling("'ab'", "[ns.a, ns.a]|join"),
    "strings that double by replace": doubling("'ab'", "ns.a|replace('a', 'aba')"),
    "strings that double by a method": doubling("'ab'", "ns.a.replace('a', 'aba')"),
    "lists that double": doubling("[1]", "ns.a + ns.a"),
    "a list that holds itself twice, written": doubling("[1]", "[ns.a, ns.a]", "{{ ns.a }}"),
    "a list that holds itself twice, as JSON": doubling("[1]", "[ns.a, ns.a]", "{{ ns.a|tojson }}"),
    "a list that holds itself twice, joined": doubling("[1]", "[ns.a, ns.a]", "{{ ns.a ~ '' }}"),
    "numbers that double": doubling("9", "ns.a * ns.a"),
    "a product": "{{ 'ab' * 99999999999 }}",
    "a power": "{{ 9 ** 99999999 }}",
    "a width": "{{ 'ab'|center(99999999999) }}",
    "a width of a method": "{{ 'ab'.ljust(99999999999) }}",
    "a width in a format": "{{ '%99999999999d' % 1 }}",
    "a width in a format method": "{{ '{:>99999999999}'.format(1) }}",
    "a width in a format filter": "{{ '%99999999999d'|format(1) }}",
    "an indent": "{{ messages|tojson(indent=999999999) }}",
    "one long join": "{{ (range(99999)|list)|join('x' * 99999) }}",
    "one long replacement": "{{ ('a' * 99999)|replace('a', 'b' * 99999) }}",
    "one long join by a method": "{{ ('x' * 99999).join(['a'] * 99999) }}",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_template_is_refused_soon(name: str) -> None:
    template = ChatTemplate(HOSTILE[name], tempting_tokenizer())
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    with pytest.raises(InvalidRequestError, match="chat template refuses the conversation"):
        template.render(USER)
    assert time.process_time() - start < LONGEST_S
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 600_000, "KiB"


@pytest.mark.parametrize(
    "source", ["{% if x %}" * 30_000, "{{ " + "(" * 30_000, "{% for a in b %}" * 60 + "{% endfor %}" * 60]
)
def test_a_template_nested_too_deep_is_named(source: str, tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text(source)
    named = r"chat_template\.jinja: .*(nested too deep|line \d+ of the chat template)"
    with pytest.raises(CheckpointError, match=named):
        load_chat_template(tmp_path, tempting_tokenizer())


def test_long_conversations_have_steps_enough() -> None:
    template = ChatTemplate(kimi_chat_template(), tempting_tokenizer())
    messages = [{"role": ("user", "assistant")[turn % 2], "content": "hello"} for turn in range(20_000)]
    assert len(template.render(messages).token_ids) > 100_000
    long = [{"role": "user", "content": "word " * 500_000}]
    assert template.render(long).text.count("word") == 500_000
