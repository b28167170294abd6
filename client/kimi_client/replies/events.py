"""The parts of a reply, piece by piece. Text of neighbouring events of one kind belongs together."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    text: str


@dataclass(frozen=True, slots=True)
class ContentDelta:
    text: str


@dataclass(frozen=True, slots=True)
class CallBegin:
    index: int
    """Place among the reply's calls, from 0."""
    call_id: str
    """functions.NAME:NUMBER; the number counts the calls of the whole conversation."""
    name: str


@dataclass(frozen=True, slots=True)
class ArgumentsDelta:
    index: int
    text: str
    """Joined they are JSON, if the model wrote JSON."""


@dataclass(frozen=True, slots=True)
class CallEnd:
    index: int
    is_complete: bool
    """False: the reply ended inside the arguments."""


Event = ReasoningDelta | ContentDelta | CallBegin | ArgumentsDelta | CallEnd
