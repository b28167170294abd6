"""A chat reply's text to thoughts, content and tool calls.

    reader = ReplyReader(DeclaredTools(tools, messages), begins_thinking=chunk.begins_thinking)
    events = reader.feed(chunk.text, chunk.control_offsets)

for chunks of a request with `return_control_offsets=True`.
"""

from kimi_client.replies.declared_tools import DeclaredTools
from kimi_client.replies.events import ArgumentsDelta, CallBegin, CallEnd, ContentDelta, Event, ReasoningDelta
from kimi_client.replies.reader import ReplyReader

__all__ = [
    "ArgumentsDelta",
    "CallBegin",
    "CallEnd",
    "ContentDelta",
    "DeclaredTools",
    "Event",
    "ReasoningDelta",
    "ReplyReader",
]
