"""The declared tool that a call means, and the id it gets.

Kimi is trained on ids of the form functions.NAME:NUMBER, where the number counts the calls of the conversation. It also
writes other forms, mostly after a history with ids of other servers.
"""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

_PREFIXES = ("functions.", "", "functions_", "functions:", "functions")
_SUFFIXES = tuple(map(re.compile, (r":\d+", "", r"[._-]\d+", r"\d+")))
_NAMELESS = re.compile(
    r"(functions[._:]?)?\d+|(call|toolu|tool|chatcmpl-tool)[_-]?[0-9A-Za-z_-]*|[0-9a-f]{8}(-?[0-9a-f]{4}){3}-?[0-9a-f]{12}"
)
"""Ids without a name: a bare number, and what other servers call their calls."""
_CANONICAL = re.compile(r"functions\..+:(\d{1,9})")


class DeclaredTools:
    """The tools of one request, and the calls of its history."""

    def __init__(self, tools: Any, messages: Any) -> None:
        """Both as the client sent them; what is malformed is left out, since the server refuses it by name."""
        self._schemas = dict(_declarations(tools))
        self._history = dict(_calls(messages))
        numbers = [int(found[1]) + 1 for call_id in self._history if (found := _CANONICAL.fullmatch(call_id))]
        self.first_number = max([sum(1 for _ in _calls(messages)), *numbers])
        """The number that the reply's first call gets; no call of the history has it."""

    def name_in(self, header: str) -> str | None:
        """The declared name in what the model wrote before the arguments; None where there is none."""
        header = "".join(header.split())
        for prefix in _PREFIXES:
            if header.startswith(prefix):
                rest = header[len(prefix) :]
                for suffix in _SUFFIXES:
                    found = re.search(f"(?:{suffix.pattern})$", rest)
                    if found and rest[: found.start()] in self._schemas:
                        return rest[: found.start()]
        return None

    def is_nameless(self, header: str) -> bool:
        """Tell whether the model wrote an id that holds no name at all."""
        return _NAMELESS.fullmatch("".join(header.split())) is not None

    def name_for(self, header: str, arguments: str) -> str | None:
        """The tool that a call without a name means: the one that had this id before, or the only one that fits.

        A tool fits if it takes all keys of the arguments and requires no others; a single declared tool always does.
        """
        before = self._history.get("".join(header.split()))
        if before in self._schemas:
            return before
        if len(self._schemas) == 1:
            return next(iter(self._schemas))
        try:
            given = json.loads(arguments)
        except (ValueError, RecursionError):
            return None
        fitting = [name for name, schema in self._schemas.items() if isinstance(given, dict) and _fits(schema, given)]
        return fitting[0] if len(fitting) == 1 else None


def _fits(schema: Mapping[str, Any], given: Mapping[str, Any]) -> bool:
    properties, required = schema.get("properties"), schema.get("required")
    if not isinstance(properties, dict):
        return False
    needed = {key for key in required if isinstance(key, str)} if isinstance(required, list) else set()
    return needed <= given.keys() <= properties.keys()


def _declarations(tools: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for tool in tools if isinstance(tools, list) else []:
        function = tool.get("function") if isinstance(tool, dict) else None
        if isinstance(function, dict) and isinstance(function.get("name"), str):
            parameters = function.get("parameters")
            yield function["name"], parameters if isinstance(parameters, dict) else {}


def _calls(messages: Any) -> Iterator[tuple[str, str]]:
    """(id, name) of every call in the history."""
    for message in messages if isinstance(messages, list) else []:
        calls = message.get("tool_calls") if isinstance(message, dict) else None
        for call in calls if isinstance(calls, list) else []:
            function = call.get("function") if isinstance(call, dict) else None
            name = function.get("name") if isinstance(function, dict) else None
            if isinstance(name, str):
                yield str(call.get("id", "")), name
