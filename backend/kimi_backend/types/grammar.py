"""Forms that a reply must have, as a request says them: values, compiled later by whichever library serves."""

from collections.abc import Mapping
from dataclasses import astuple, dataclass


@dataclass(frozen=True, slots=True)
class JsonSchema:
    """A JSON text that fits a schema, on one line, as `json.dumps` writes it."""

    schema: str
    """JSON; checked by `grammar.schema_checks`."""


@dataclass(frozen=True, slots=True)
class Regex:
    """A text that a pattern matches from its beginning to its end."""

    pattern: str


@dataclass(frozen=True, slots=True)
class Choice:
    """One of some texts."""

    texts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Ebnf:
    """A text of a context-free grammar, whose first rule is `root`."""

    text: str


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool that may be called."""

    name: str
    schema: str
    """JSON schema of its arguments, an object; checked likewise."""


@dataclass(frozen=True, slots=True)
class CallTokens:
    """Ids of the control tokens around calls."""

    section_begin: int
    call_begin: int
    arguments_begin: int
    call_end: int
    section_end: int

    @classmethod
    def of(cls, control_tokens: Mapping[str, int]) -> "CallTokens | None":
        """Those of a tokenizer, text -> id; None where it lacks one."""
        ids = [control_tokens.get(text) for text in _CALL_TOKENS]
        return None if None in ids else cls(*ids)  # type: ignore[arg-type]


_CALL_TOKENS = (
    "<|tool_calls_section_begin|>",
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
    "<|tool_calls_section_end|>",
)


@dataclass(frozen=True, slots=True)
class ToolCalls:
    """A section of calls in Kimi's own form: `functions.NAME:NUMBER` and arguments between control tokens."""

    tools: tuple[Tool, ...]
    tokens: CallTokens
    first_number: int
    """The number of the first call; the others count on."""
    most_calls: int
    is_section_begun: bool = False
    """True where the token that begins the section stands before the text already."""


@dataclass(frozen=True, slots=True)
class Either:
    """One of some forms."""

    forms: "tuple[Form, ...]"


Form = JsonSchema | Regex | Choice | Ebnf | ToolCalls | Either


@dataclass(frozen=True, slots=True)
class Grammar:
    """A form of the reply, and where it begins."""

    form: Form
    field: str
    """The request's field that asks for it, as errors name it."""
    begins_after: int | None = None
    """The token behind which it begins; None: at once. It begins once."""
    must_begin: bool = True
    """True if the reply may not end, or have another control token, before it begins."""


def call_token_ids(control_tokens: Mapping[str, int]) -> tuple[int, ...]:
    """Ids of the tokens around calls, of a tokenizer's control tokens; none where it lacks one."""
    tokens = CallTokens.of(control_tokens)
    return () if tokens is None else astuple(tokens)
