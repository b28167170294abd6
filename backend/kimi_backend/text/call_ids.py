"""Gives the calls of a conversation the ids that Kimi is trained on: functions.NAME:NUMBER, counted from 0.

Clients bring ids of other servers, ids cut to the letters that some library allows, and numbers that begin anew each
turn. A model that reads those writes such ids itself, and soon calls without a name.
"""

from typing import Any


def number_calls(messages: list[dict[str, Any]]) -> None:
    """Rewrite the ids of all calls, and of the results that belong to them, in place.

    A result belongs to the latest call before it that has its id; of several with one id in one turn, to the first that
    has no result yet. A result without such a call keeps its id.

    Args:
        messages: as `chat_messages.check_messages` returns them.
    """
    number = 0
    numbered: dict[str, list[str]] = {}
    for message in messages:
        of_turn: dict[str, list[str]] = {}
        for call in message.get("tool_calls", ()):
            call_id = f"functions.{call['function']['name']}:{number}"
            number += 1
            if call.get("id"):
                of_turn.setdefault(call["id"], []).append(call_id)
            call["id"] = call_id
        numbered |= of_turn
        if message["role"] == "tool" and (ids := numbered.get(message.get("tool_call_id", ""))):
            message["tool_call_id"] = ids.pop(0) if len(ids) > 1 else ids[0]
