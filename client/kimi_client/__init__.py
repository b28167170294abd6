"""A typed client for the `spec_ensemble` model: blocking here, asyncio in `kimi_client.aio`."""

from kimi_client._client import KimiClient, Stream
from kimi_client._errors import (
    InvalidRequest,
    KimiClientError,
    RequestCancelled,
    RequestTimedOut,
    ServerBusy,
    ServerFailed,
    ServerUnreachable,
)
from kimi_client._fields import RequestFields
from kimi_client._transport import AsyncTransport, Transport
from kimi_client._types import Chunk, Completion, PromptLogprob, TokenLogprob
from kimi_client.text_origins import TextOrigins

__all__ = [
    "AsyncTransport",
    "Chunk",
    "Completion",
    "InvalidRequest",
    "KimiClient",
    "KimiClientError",
    "PromptLogprob",
    "RequestCancelled",
    "RequestFields",
    "RequestTimedOut",
    "ServerBusy",
    "ServerFailed",
    "ServerUnreachable",
    "Stream",
    "TextOrigins",
    "TokenLogprob",
    "Transport",
]
