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
from kimi_client._types import Chunk, Completion, TokenLogprob

__all__ = [
    "Chunk",
    "Completion",
    "InvalidRequest",
    "KimiClient",
    "KimiClientError",
    "RequestCancelled",
    "RequestTimedOut",
    "ServerBusy",
    "ServerFailed",
    "ServerUnreachable",
    "Stream",
    "TokenLogprob",
]
