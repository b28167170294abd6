"""Conversations to prompts through the checkpoint's own template, in a sandbox, safe against forged control tokens."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser

from kimi_backend.config.regular_files import read_regular_text
from kimi_backend.errors import CheckpointError, InvalidRequestError
from kimi_backend.text.bounded_templates import BoundedEnvironment, render
from kimi_backend.text.call_ids import number_calls
from kimi_backend.text.chat_messages import TEXT_FIELDS, check_messages, check_template_kwargs, check_tools
from kimi_backend.text.prompt_guard import PromptGuard, StandIns, strings_in
from kimi_backend.text.special_tokens import ControlTokenSplitter
from kimi_backend.text.tokenizer import Tokenizer
from kimi_backend.text.tokenizer_files import TOKENIZER_CONFIG_FILE, TokenizerConfig
from kimi_backend.text.tool_declaration import declare_tools, sort_keys

CHAT_TEMPLATE_FILE = "chat_template.jinja"
_TYPESCRIPT_VARIABLE = "tools_ts_str"
_FIRST_PRIVATE_PLANE = 0xF0000
_TEMPLATE_FAILURES = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,  # the sandbox raises OverflowError for a long range
    RecursionError,
)


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A rendered conversation."""

    text: str
    token_ids: list[int]
    """Control tokens only where the template wrote them."""


class ChatTemplate:
    """A compiled template and the tokenizer it goes with. Immutable, so threads may share one."""

    def __init__(self, source: str, tokenizer: Tokenizer, tools_source: str | None = None) -> None:
        """Args:
        source: the Jinja template.
        tools_source: another one for conversations with tools, where the checkpoint has it.

        Raises:
            jinja2.TemplateSyntaxError: not a template.
        """
        environment = _make_environment()
        self._source = source + (tools_source or "")
        self._variables = frozenset(
            name
            for template in (source, tools_source or "")
            for name in meta.find_undeclared_variables(environment.parse(template))
        )
        self._template = environment.from_string(source)
        self._tools_template = environment.from_string(tools_source) if tools_source is not None else self._template
        self._tokenizer = tokenizer
        self._end_ids = frozenset(tokenizer.eos_token_ids)
        self._splitter = ControlTokenSplitter(tokenizer.control_tokens)
        self._guard = PromptGuard(tokenizer.control_tokens)

    def render(
        self,
        messages: Any,
        *,
        tools: Any = None,
        add_generation_prompt: bool = True,
        template_kwargs: Any = None,
        enough: float = math.inf,
    ) -> ChatPrompt:
        """The prompt of a conversation, as a client sent it.

        Args:
            messages: see `chat_messages`.
            tools: OpenAI tool declarations.
            add_generation_prompt: end with the opening of an assistant's turn, unless the last message is `partial`:
                then the prompt ends inside it.
            template_kwargs: the template's own switches, such as {"thinking": False}.
            enough: the rest of the token ids may be left out once there are more than this.

        Raises:
            InvalidRequestError: a malformed conversation, or one that the template refuses.
        """
        variables = self._check(messages, tools, template_kwargs)
        strings = list(strings_in(variables))
        stand_ins = self._choose_stand_ins(variables, strings)
        if stand_ins is not None:
            variables = _protect(variables, stand_ins)
        template = self._tools_template if variables["tools"] else self._template
        is_continued = variables["messages"][-1].pop("partial", False)
        own = {"add_generation_prompt": add_generation_prompt and not is_continued, **self._tokenizer.special_names}
        rendered = _run(template, variables | own, strings)
        if is_continued:
            rendered = self._without_end(rendered)
        token_ids: list[int] = []
        for piece in self._splitter.split(rendered):
            if isinstance(piece, int):
                token_ids.append(piece)
            elif len(token_ids) <= enough:
                text = stand_ins.restore(piece) if stand_ins else piece
                token_ids.extend(self._tokenizer.encode(text, enough=enough - len(token_ids)))
        return ChatPrompt(stand_ins.restore(rendered) if stand_ins else rendered, token_ids)

    def encode(
        self, messages: Any, *, tools: Any = None, add_generation_prompt: bool = True, template_kwargs: Any = None
    ) -> list[int]:
        """The token ids of `render`'s prompt."""
        prompt = self.render(
            messages, tools=tools, add_generation_prompt=add_generation_prompt, template_kwargs=template_kwargs
        )
        return prompt.token_ids

    def _without_end(self, rendered: str) -> str:
        """The prompt without the end of its last turn."""
        ends = [text for text, token_id in self._tokenizer.control_tokens.items() if token_id in self._end_ids]
        at = max((rendered.rfind(text) for text in ends), default=-1)
        if at < 0:
            raise InvalidRequestError(
                "messages: the model's chat template does not end turns, so none can be continued"
            )
        return rendered[:at]

    def _check(self, messages: Any, tools: Any, template_kwargs: Any) -> dict[str, Any]:
        kwargs = check_template_kwargs(template_kwargs, self._variables)
        checked_tools, checked_messages = check_tools(tools), check_messages(messages)
        number_calls(checked_messages)
        variables: dict[str, Any] = {"messages": checked_messages, "tools": checked_tools, "documents": None}
        if checked_tools and _TYPESCRIPT_VARIABLE in self._source:
            # K2.5 and later were trained on these declarations, written from schemas with sorted keys.
            variables["tools"] = sort_keys(checked_tools)
            declarations = declare_tools(checked_tools)
            if declarations is not None:
                variables[_TYPESCRIPT_VARIABLE] = declarations
        return kwargs | variables

    def _choose_stand_ins(self, variables: Mapping[str, Any], strings: list[str]) -> StandIns | None:
        guard = self._guard
        # A field of a message may be a piece of a token that the template's own text completes on both sides.
        alone = [str(message.get(key, "")) for message in variables["messages"] for key in ("content", *TEXT_FIELDS)]
        if all(map(guard.is_harmless, strings)) and all(guard.is_harmless(text, alone=True) for text in alone):
            return None
        return guard.choose_stand_ins([*strings, self._source])


def load_chat_template(path: str | Path, tokenizer: Tokenizer) -> ChatTemplate | None:
    """The chat template of the checkpoint in folder `path`: chat_template.jinja, else tokenizer_config.json's.

    Returns:
        None when the checkpoint has none (a base model).

    Raises:
        CheckpointError: a template that does not compile; names file and line.
    """
    folder = Path(path)
    file = folder / CHAT_TEMPLATE_FILE
    if file.exists():
        try:
            templates = {"default": read_regular_text(file)}
        except (OSError, UnicodeDecodeError) as error:
            raise CheckpointError(str(file), [f"cannot be read as UTF-8 text: {error}"]) from error
    else:
        file = folder / TOKENIZER_CONFIG_FILE
        templates = TokenizerConfig.from_folder(folder).chat_templates if file.exists() else {}
    if not templates:
        return None
    if "default" not in templates:
        raise CheckpointError(str(file), [f"chat_template has {sorted(templates)}; one named 'default' is expected"])
    try:
        return ChatTemplate(templates["default"], tokenizer, templates.get("tool_use"))
    except jinja2.TemplateSyntaxError as error:
        raise CheckpointError(str(file), [f"line {error.lineno} of the chat template: {error.message}"]) from error
    except (RecursionError, SyntaxError, MemoryError) as error:  # Python's own limits, which Jinja does not translate
        raise CheckpointError(str(file), [f"the chat template is nested too deep: {error}"]) from error


def _protect(variables: dict[str, Any], stand_ins: StandIns) -> dict[str, Any]:
    """The client's strings, disarmed. Roles stay: they are one of a fixed list, and templates compare them."""
    protected = {}
    for key, value in variables.items():
        if key == "messages":
            protected[key] = [_protect_message(message, stand_ins) for message in value]
        else:
            protected[key] = stand_ins.protect_json(value)
    return protected


def _protect_message(message: dict[str, Any], stand_ins: StandIns) -> dict[str, Any]:
    protected = {}
    for key, value in message.items():
        if key == "role":
            protected[key] = value
        elif key == "content" or key in TEXT_FIELDS:
            protected[key] = stand_ins.protect(value, alone=True)
        else:
            protected[stand_ins.protect(key)] = stand_ins.protect_json(value)
    return protected


def _run(template: jinja2.Template, variables: dict[str, Any], strings: list[str]) -> str:
    """strings: those of the conversation, which bound how long the rendering may take."""
    try:
        return render(template, variables, len(strings), sum(map(len, strings)))
    except _TEMPLATE_FAILURES as error:
        # The template is the checkpoint's and the conversation the client's; most often they do not fit each other.
        raise InvalidRequestError(f"messages: the model's chat template refuses the conversation: {error}") from error


def _make_environment() -> BoundedEnvironment:
    """The environment that Hugging Face's `apply_chat_template` documents, so that templates run unchanged."""
    environment = BoundedEnvironment(
        {"tojson": _to_json},
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.loopcontrols", _GenerationBlock],
    )
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    del environment.globals["lipsum"]
    return environment


class _GenerationBlock(Extension):
    """`{% generation %}` marks what an assistant wrote, for training; a server renders its body."""

    tags = {"generation"}  # noqa: RUF012 - the base class declares a mutable set

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON text, unlike Jinja's own filter without HTML escapes.

    With `ensure_ascii`, private-use characters of the high planes stay as they are: the prompt guard's stand-ins must
    survive.
    """
    text = json.dumps(value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys)
    if not ensure_ascii or text.isascii():
        return text
    return "".join(
        char if ord(char) < 128 or ord(char) >= _FIRST_PRIVATE_PLANE else json.dumps(char)[1:-1] for char in text
    )
