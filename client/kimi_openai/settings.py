"""The operator's choices."""

from dataclasses import dataclass, field

from kimi_openai.api_keys import ApiKey
from kimi_openai.connection_limits import ConnectionLimits


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointSettings:
    url: str = "localhost:8001"
    """host:port of the server's gRPC endpoint."""
    model_names: tuple[str, ...] = ("kimi",)
    """Names that clients may ask for; replies carry the one that was asked for."""
    api_keys: tuple[ApiKey, ...] = ()
    """The keys of which clients must send one as a bearer token; without any nobody is asked."""
    names: tuple[str, ...] = ()
    """Hosts, with or without a port, that clients and pages may call it by, besides localhost and its address."""
    cors_origins: tuple[str, ...] = ()
    """Origins of pages elsewhere that may talk to it, such as https://app.example."""
    refuses_unknown_fields: bool = True
    """False leaves fields that nobody knows out, with a line in the log."""
    splits_thinking: bool = True
    """Thoughts are sent as `reasoning_content`; False leaves them in `content`, as the model wrote them."""
    has_chat_page: bool = True
    """`/` answers with a chat page for browsers."""
    stop_within_s: int = 35
    """Seconds after which a stopping endpoint cuts what is still open; the server's own drain is to end it before."""
    limits: ConnectionLimits = field(default_factory=ConnectionLimits)
    """The limits on what clients may take of it."""
