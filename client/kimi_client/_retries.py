"""The rules by which a request that was refused is sent again.

It is one that nobody has begun to answer: the server had no room or was shutting down, or there was no connection. It
goes over a new connection, which a load balancer may give to another server.
"""

import random
from collections.abc import Iterator

from kimi_client._errors import InvalidRequest, KimiClientError, ServerBusy, ServerUnreachable

FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 2.0


def retry_pauses(max_retries: int) -> Iterator[float]:
    """Seconds before each time that a request is sent again: twice as long each time, of which up to half is random.

    Raises:
        InvalidRequest: the number is negative.
    """
    if max_retries < 0:
        raise InvalidRequest(f"max_retries: {max_retries} given, at least 0 is allowed")
    return _pauses(max_retries)


def _pauses(max_retries: int) -> Iterator[float]:
    for number in range(max_retries):
        yield min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2**number) * random.uniform(0.5, 1.0)


def may_retry(error: KimiClientError) -> bool:
    """Tell whether the same request may succeed if it is sent again."""
    return isinstance(error, (ServerBusy, ServerUnreachable))
