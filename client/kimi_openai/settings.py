"""What an operator chooses."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointSettings:
    url: str = "localhost:8001"
    """host:port of the server's gRPC endpoint."""
    model_names: tuple[str, ...] = ("kimi",)
    """Names that clients may ask for; replies carry the one that was asked for."""
    api_key: str = ""
    """What clients must send as a bearer token; empty asks for none."""
    splits_thinking: bool = False
    """The chat template opens replies with <think>: what comes before </think> is sent as `reasoning_content`."""
    has_chat_page: bool = True
    """`/` answers with a chat page for browsers."""
