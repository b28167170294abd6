"""A sandbox for a checkpoint's templates in which no template runs without end.

The templates are the checkpoint's and may be hostile: loops in loops, macros that call themselves twice, strings and
lists that double. So every pass of a loop, every call and filter, and every thousand characters made is a step, a
rendering has so many steps as its conversation is long, and no value is made that is longer than a bound. What the
bounds stop ends like any other refusal of a template.
"""

import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

MIN_STEPS = 500_000
"""The steps that every rendering may take."""
STEPS_A_STRING = 200
"""More for each string of the conversation; the longest template of the family takes some 60 for a message."""
MIN_CHARS = 1 << 22
CHARS_A_CHAR = 16
"""A value, and the prompt, may have MIN_CHARS and so many times the characters of the conversation."""
_CHARS_A_STEP = 1000
_MAX_ARGUMENT = 100_000
"""The largest number given to a function or filter: widths, counts, indents."""
_MAX_GROWTH = 64
"""A function of two long values may make so many times the longest value: `replace`, `join`."""
_WRITING = ("tojson", "string", "pprint", "join", "format", "urlencode", "xmlattr", "escape", "e", "safe", "indent")
"""Filters that write the whole of what they are given."""
_COUNTED, _JOINED = "_counted", "_joined"


class Budget(threading.local):
    """The work that the rendering of this thread may still do."""

    steps = MIN_STEPS
    max_chars = MIN_CHARS

    def start(self, num_strings: int, num_chars: int) -> None:
        """Args:
        num_strings, num_chars: of the conversation.
        """
        self.steps = MIN_STEPS + STEPS_A_STRING * num_strings
        self.max_chars = MIN_CHARS + CHARS_A_CHAR * num_chars

    def take(self, steps: int = 1) -> None:
        """Raises SecurityError when nothing is left."""
        self.steps -= steps
        if self.steps < 0:
            raise SecurityError("the template does not come to an end: it takes too many steps for this conversation")

    def check_length(self, length: int) -> None:
        """Take the steps of making a value; raises SecurityError where it is too long."""
        if length > self.max_chars:
            raise SecurityError("the template makes a value that is too long for this conversation")
        self.take(1 + length // _CHARS_A_STEP)

    def made(self, value: Any) -> Any:
        """The value, which took steps by its length."""
        if isinstance(value, str | list | tuple | dict):
            self.check_length(len(value))
        return value

    def check_written(self, value: Any) -> None:
        """Refuse a value that is too long as text, found without writing it: a list may hold another twice."""
        left, unseen = self.max_chars, [value]
        while unseen:
            item = unseen.pop()
            self.take(1)
            left -= 1
            if isinstance(item, str):
                left -= len(item)
            elif isinstance(item, Mapping):
                unseen += [*item.keys(), *item.values()]
            elif isinstance(item, list | tuple | set):
                unseen += item
            if left < 0 or len(unseen) > self.max_chars:
                raise SecurityError("the template writes a value that is too long for this conversation")

    def check_arguments(self, values: Iterable[Any]) -> None:
        """Refuse what a function may make a huge value of."""
        lengths = []
        for value in values:
            if isinstance(value, int) and abs(value) > _MAX_ARGUMENT:
                raise SecurityError(f"the template gives a function a number beyond {_MAX_ARGUMENT:,}")
            if isinstance(value, str | list | tuple):
                lengths.append(len(value))
        longest = sorted(lengths)[-2:]
        if len(longest) == 2 and longest[0] * longest[1] > _MAX_GROWTH * self.max_chars:
            raise SecurityError("the template gives a function two values that are too long")


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox of the Jinja library, in which a `Budget` bounds time and size."""

    intercepted_binops = frozenset(["+", "*", "%", "**"])

    def __init__(self, filters: Mapping[str, Callable[..., Any]], **options: Any) -> None:
        """filters: more than the library's."""
        super().__init__(finalize=self._finalize, **options)
        self.budget = Budget()
        for name, function in {**self.filters, **filters}.items():
            self.filters[name] = self._bounded(name, function)
        self.filters[_COUNTED] = self._counted
        self.filters[_JOINED] = self._joined

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        return _Counting().visit(super()._parse(source, name, filename))  # type: ignore[no-any-return]

    def _bounded(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        # The copied attributes tell the library whether the function wants the context.
        @functools.wraps(function)
        def bounded(*args: Any, **kwargs: Any) -> Any:
            values = (*args, *kwargs.values())
            self.budget.take()
            self.budget.check_arguments(values)
            if name in _WRITING:
                self.budget.check_written([value for value in values if not isinstance(value, jinja2.runtime.Context)])
            if name == "format":
                _refuse_wide_formats(values)
            return self.budget.made(function(*args, **kwargs))

        return bounded

    def _counted(self, items: Iterable[Any]) -> Iterator[Any]:
        """Count each element that a loop goes through as a step."""
        for item in items:
            self.budget.take()
            yield item

    def _joined(self, parts: list[Any]) -> str:
        """Join the parts of `~`."""
        self.budget.check_written(parts)
        return str(self.budget.made("".join(map(str, parts))))

    def _finalize(self, value: Any) -> Any:
        if not isinstance(value, str):
            self.budget.check_written(value)
        return value

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        sizes = [len(side) for side in (left, right) if isinstance(side, str | list | tuple)]
        if operator == "+" and len(sizes) == 2:
            self.budget.check_length(sum(sizes))
        elif operator == "*" and len(sizes) == 1:
            count = right if isinstance(right, int) else left
            self.budget.check_length(sizes[0] * max(0, int(count)))
        elif operator == "*" and isinstance(left, int) and isinstance(right, int):
            self.budget.check_length(left.bit_length() + right.bit_length())
        elif operator == "%" and isinstance(left, str):
            _refuse_wide_formats([left])
            self.budget.check_arguments([left, *(right if isinstance(right, tuple) else [right])])
            self.budget.check_written([left, right])
        elif operator == "**":
            self.budget.check_arguments([left, right])
            self.budget.check_length(max(1, int(left).bit_length()) * max(0, int(right)))
        return super().call_binop(context, operator, left, right)

    def call(self, context: Any, obj: Any, *args: Any, **kwargs: Any) -> Any:
        # The sandbox wraps `str.format`.
        method = getattr(obj, "__wrapped__", obj)
        values = (getattr(method, "__self__", None), *args, *kwargs.values())
        self.budget.take()
        self.budget.check_arguments(values)
        if isinstance(values[0], str):
            _refuse_wide_formats(values[:1])
            self.budget.check_written(list(values))
        return self.budget.made(super().call(context, obj, *args, **kwargs))


class _Counting(NodeTransformer):
    """Puts the environment's own filters around what loops go through and what `~` joins."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.iter = nodes.Filter(node.iter, _COUNTED, [], [], None, None, lineno=node.lineno)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        parts = nodes.List(node.nodes, lineno=node.lineno)
        return nodes.Filter(parts, _JOINED, [], [], None, None, lineno=node.lineno)


def _refuse_wide_formats(values: Iterable[Any]) -> None:
    """A width of seven digits in a format string makes megabytes of spaces."""
    for form in values:
        digits = 0
        for char in form if isinstance(form, str) and ("%" in form or "{" in form) else "":
            digits = digits + 1 if char.isdigit() else 0
            if digits > 6:
                raise SecurityError("the template formats a value to a width of millions")


def render(template: jinja2.Template, variables: dict[str, Any], num_strings: int, num_chars: int) -> str:
    """The text that a template of a `BoundedEnvironment` makes.

    Args:
        num_strings, num_chars: of the conversation among the variables.
    Raises:
        jinja2.TemplateError: the template refuses the conversation, or does not come to an end.
    """
    environment = template.environment
    assert isinstance(environment, BoundedEnvironment)
    budget = environment.budget
    budget.start(num_strings, num_chars)
    pieces, length = [], 0
    for piece in template.generate(variables):
        pieces.append(piece)
        length += len(piece)
        budget.take(len(piece) // _CHARS_A_STEP)
        if length > budget.max_chars:
            raise SecurityError(f"the template writes more than {budget.max_chars:,} characters for this conversation")
    return "".join(pieces)
