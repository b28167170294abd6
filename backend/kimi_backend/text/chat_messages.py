"""Checks what a client sends as a conversation, before a template sees it. The rest of the code relies on these shapes.

A message is an object with `role` (one of ROLES), `content` (text, or a list of parts of type "text", which are joined;
may be null or absent where an assistant called tools or only reasoned), and optionally `name`, `tool_call_id`,
`reasoning_content` (text; `reasoning` is another name for it) and `tool_calls`. The last one, if it is an assistant's,
may be `partial` (or `prefix`): the reply continues it. Other fields go to the template as they are.
"""

import difflib
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from kimi_backend.errors import InvalidRequestError
from kimi_backend.text.unicode_text import require_valid_unicode

ROLES = ("system", "developer", "user", "assistant", "tool")
TEXT_FIELDS = ("name", "tool_call_id", "reasoning_content")
CONTINUE_FIELDS = ("partial", "prefix")
"""The names by which other servers mark a message that the reply continues."""
THINKING_NAMES = ("thinking", "enable_thinking")
"""The names by which templates call their switch for thinking."""
MAX_JSON_DEPTH = 64
RESERVED_KWARGS = frozenset(
    {
        *("messages", "tools", "tools_ts_str", "documents", "add_generation_prompt"),
        *("bos_token", "eos_token", "pad_token", "unk_token"),
        *("raise_exception", "strftime_now"),
    }
)
"""Variables that the server sets itself."""


def check_messages(messages: Any) -> list[dict[str, Any]]:
    """The messages as fresh objects, contents joined to one string each, fields that are null left out.

    Raises:
        InvalidRequestError: names the message's index, the field, and what is allowed.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, (str, bytes)) or not messages:
        raise InvalidRequestError(f"messages is {_shown(messages)}; a list with at least one message is expected")
    checked = [_check_message(message, f"messages[{index}]") for index, message in enumerate(messages)]
    for index, message in enumerate(checked[:-1]):
        if message.get("partial"):
            raise InvalidRequestError(f"messages[{index}].partial: true given, only the last message can be continued")
    return checked


def check_tools(tools: Any) -> list[dict[str, Any]] | None:
    """The tools as fresh objects; None when there are none.

    Raises:
        InvalidRequestError: a tool is not {"type": "function", "function": {"name": …}}; names index and field.
    """
    if tools is None:
        return None
    if not isinstance(tools, Sequence) or isinstance(tools, (str, bytes)):
        raise InvalidRequestError(f"tools is {_shown(tools)}; a list of tools is expected")
    checked = []
    for index, tool in enumerate(tools):
        field = f"tools[{index}]"
        copied = copy_json(tool, field)
        if not isinstance(copied, dict) or copied.get("type") != "function":
            raise InvalidRequestError(f'{field}.type must be "function"; got {_shown(tool)}')
        function = copied.get("function")
        if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
            raise InvalidRequestError(f"{field}.function.name must be text; got {_shown(function)}")
        if not isinstance(function.get("parameters", {}), (dict, type(None))):
            raise InvalidRequestError(
                f"{field}.function.parameters must be a JSON schema object; got {_shown(function['parameters'])}"
            )
        strict = function.pop("strict", None)  # what follows from it is no business of the template's
        if not isinstance(strict, (bool, type(None))):
            raise InvalidRequestError(f"{field}.function.strict must be true or false; got {_shown(strict)}")
        checked.append(copied)
    return checked or None


def check_template_kwargs(kwargs: Any, known: Collection[str]) -> dict[str, Any]:
    """The template's extra arguments, such as {"thinking": false}. The switch for thinking may go by either name.

    Args:
        known: variables that the template reads.

    Raises:
        InvalidRequestError: not an object, or it names a variable that the server sets, or that the template does not
            read.
    """
    if kwargs is None:
        return {}
    copied = copy_json(kwargs, "chat_template_kwargs")
    if not isinstance(copied, dict):
        raise InvalidRequestError(f"chat_template_kwargs is {_shown(kwargs)}; an object is expected")
    for key in copied:
        if key in RESERVED_KWARGS:
            raise InvalidRequestError(
                f"chat_template_kwargs.{key} is set by the server; give {key} in its own field, if it has one"
            )
        if not key.isidentifier():
            raise InvalidRequestError(f"chat_template_kwargs has the key {_shown(key)}; a variable name is expected")
    return {_known_kwarg(key, known): value for key, value in copied.items()}


def _known_kwarg(key: str, known: Collection[str]) -> str:
    if key in known:
        return key
    if key in THINKING_NAMES and (others := [name for name in THINKING_NAMES if name in known]):
        return others[0]
    choices = sorted(name for name in known if name not in RESERVED_KWARGS)
    near = difflib.get_close_matches(key, choices, 1, cutoff=0.6)
    meant = f" (is {near[0]} meant?)" if near else f"; it reads {', '.join(choices) or 'none'}"
    raise InvalidRequestError(f"chat_template_kwargs.{_cut(key)}: the model's chat template does not read it{meant}")


def copy_json(value: Any, field: str, depth: int = 0) -> Any:
    """A deep copy of a JSON value.

    Raises:
        InvalidRequestError: not a JSON value, nested deeper than MAX_JSON_DEPTH, or a string with a lone surrogate.
    """
    if depth > MAX_JSON_DEPTH:
        raise InvalidRequestError(f"{field} is nested deeper than {MAX_JSON_DEPTH} levels")
    if isinstance(value, str):
        require_valid_unicode(value, field)
        return value
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise InvalidRequestError(f"{field} has the key {key!r}; keys are text")
            require_valid_unicode(key, f"a key of {field}")
        return {key: copy_json(item, f"{field}.{key}", depth + 1) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, (bytes, bytearray)):
        return [copy_json(item, f"{field}[{index}]", depth + 1) for index, item in enumerate(value)]
    raise InvalidRequestError(f"{field} is a {type(value).__name__}; JSON values are allowed")


def _check_message(message: Any, field: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise InvalidRequestError(f"{field} is {_shown(message)}; an object with role and content is expected")
    role = message.get("role")
    if role not in ROLES:
        raise InvalidRequestError(f"{field}.role is {_shown(role)}; allowed: {', '.join(ROLES)}")
    checked: dict[str, Any] = {"role": role, "content": _join_content(message, field)}
    for key, value in message.items():
        if key in ("role", "content") or value is None:
            continue
        if key in CONTINUE_FIELDS:
            _check_continued(message, key, field)
            if value:
                checked["partial"] = True
            continue
        if key == "reasoning":
            if message.get("reasoning_content") is not None:
                continue
            key = "reasoning_content"
        if key in TEXT_FIELDS and not isinstance(value, str):
            raise InvalidRequestError(f"{field}.{key} is {_shown(value)}; text is expected")
        if key == "tool_calls":
            value = _check_tool_calls(value, f"{field}.tool_calls")
            if not value:
                continue
            if role != "assistant":
                raise InvalidRequestError(f"{field}.tool_calls: only an assistant calls tools; the role is {role!r}")
        checked[key] = copy_json(value, f"{field}.{key}")
    return checked


def _check_continued(message: Mapping[str, Any], key: str, field: str) -> None:
    value = message[key]
    if not isinstance(value, bool):
        raise InvalidRequestError(f"{field}.{key} is {_shown(value)}; true or false is expected")
    if value and (message.get("role") != "assistant" or message.get("tool_calls")):
        raise InvalidRequestError(f"{field}.{key}: true given, only an assistant's text can be continued")


def _join_content(message: Mapping[str, Any], field: str) -> str:
    content = message.get("content")
    if isinstance(content, str):
        require_valid_unicode(content, f"{field}.content")
        return content
    if content is None:
        has_more = any(message.get(key) for key in ("tool_calls", "reasoning_content", "reasoning"))
        if message.get("role") == "assistant" and has_more:
            return ""
        raise InvalidRequestError(f"{field}.content is missing; text, or a list of text parts, is expected")
    if not isinstance(content, Sequence) or isinstance(content, (bytes, bytearray)):
        raise InvalidRequestError(f"{field}.content is {_shown(content)}; text, or a list of text parts, is expected")
    return "".join(_part_text(part, f"{field}.content[{index}]") for index, part in enumerate(content))


def _part_text(part: Any, field: str) -> str:
    if not isinstance(part, Mapping):
        raise InvalidRequestError(
            f'{field} is {_shown(part)}; an object like {{"type": "text", "text": …}} is expected'
        )
    kind = part.get("type")
    if kind != "text":
        raise InvalidRequestError(f"{field}.type is {_shown(kind)}; this server reads text only, allowed: 'text'")
    text = part.get("text")
    if not isinstance(text, str):
        raise InvalidRequestError(f"{field}.text is {_shown(text)}; text is expected")
    require_valid_unicode(text, f"{field}.text")
    return text


def _check_tool_calls(calls: Any, field: str) -> list[Any]:
    if not isinstance(calls, Sequence) or isinstance(calls, (str, bytes)):
        raise InvalidRequestError(f"{field} is {_shown(calls)}; a list is expected")
    for index, call in enumerate(calls):
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise InvalidRequestError(f"{field}[{index}].function.name must be text; got {_shown(call)}")
        if not isinstance(function.get("arguments", ""), (str, Mapping)):
            raise InvalidRequestError(f"{field}[{index}].function.arguments must be JSON text or an object")
        if not isinstance(call.get("id", ""), str):
            raise InvalidRequestError(f"{field}[{index}].id is {_shown(call['id'])}; text is expected")
    return list(calls)


def _shown(value: Any) -> str:
    return _cut(repr(value))


def _cut(text: str) -> str:
    return text if len(text) <= 80 else text[:80] + "…"
