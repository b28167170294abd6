"""Keys say who may call the endpoint, and how much: from a file, each with a rate and a number of requests at once.

The file is JSON, an object of names:

    {"team-a": {"key": "sk-…", "rate": "120/minute", "concurrency": 16}, "team-b": {"key": "sk-…"}}

A rate is the `limits` library's text, such as `5/second` or `1000/hour`, counted over a moving window.
"""

import hashlib
import hmac
import json
import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from limits import RateLimitItem, parse
from limits.storage import MemoryStorage
from limits.strategies import MovingWindowRateLimiter

from kimi_openai.errors import ApiError

_FIELDS = {"key", "rate", "concurrency"}
_SOON = {"Retry-After": "1"}


class BadKeys(ValueError):
    """A file of keys that cannot be used; says what is wrong without showing a key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiKey:
    """One caller. The key itself is not kept."""

    name: str
    digest: bytes
    rate: RateLimitItem | None = None
    concurrency: int | None = None

    @classmethod
    def of(cls, name: str, key: str, **limits: Any) -> "ApiKey":
        return cls(name=name, digest=_digest(key.encode()), **limits)


def read_keys(path: Path) -> tuple[ApiKey, ...]:
    """
    Raises:
        BadKeys: the file is no such object, or a rate or a number is wrong.
        OSError: it cannot be read.
    """
    try:
        value = json.loads(path.read_text())
    except ValueError as error:
        raise BadKeys(f"{path}: not JSON ({error})") from None
    if not isinstance(value, dict) or not value:
        raise BadKeys(f'{path}: an object of names is needed, such as {{"team-a": {{"key": "…"}}}}')
    keys = tuple(_read_key(f"{path}: {name}", name, entry) for name, entry in value.items())
    if len({key.digest for key in keys}) < len(keys):
        raise BadKeys(f"{path}: two names have the same key")
    return keys


def _read_key(where: str, name: str, entry: object) -> ApiKey:
    if not isinstance(entry, dict) or set(entry) - _FIELDS:
        raise BadKeys(f"{where}: an object with {', '.join(sorted(_FIELDS))} is needed")
    key, rate, concurrency = (entry.get(field) for field in ("key", "rate", "concurrency"))
    if not isinstance(key, str) or not key:
        raise BadKeys(f"{where}: key is needed, a text")
    if concurrency is not None and (type(concurrency) is not int or concurrency < 1):
        raise BadKeys(f"{where}: concurrency: {concurrency!r} given, at least 1 is allowed")
    try:
        item = None if rate is None else parse(rate)
    except (ValueError, TypeError):
        raise BadKeys(f"{where}: rate: {rate!r} given, such as '120/minute' is allowed") from None
    return ApiKey.of(name, key, rate=item, concurrency=concurrency)


def _digest(text: bytes) -> bytes:
    return hashlib.sha256(text).digest()


class KeyRing:
    """All keys of an endpoint and what each has running; none at all lets everybody in. One event loop uses it."""

    def __init__(self, keys: tuple[ApiKey, ...]) -> None:
        self._keys = keys
        self._rates = MovingWindowRateLimiter(MemoryStorage())
        self._num_running: dict[str, int] = {}

    def owner(self, headers: Mapping[str, str]) -> ApiKey | None:
        """The owner's key that a request shows; None where none is asked for.

        Raises:
            ApiError: 401, it shows none that is known.
        """
        if not self._keys:
            return None
        scheme, _, given = headers.get("authorization", "").encode("latin-1").partition(b" ")
        digest = _digest(given)
        found = [key for key in self._keys if hmac.compare_digest(key.digest, digest)]
        if scheme != b"Bearer" or not found:
            message = "the header Authorization has no valid key; Bearer KEY is needed"
            raise ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
        return found[0]

    @contextmanager
    def running(self, key: ApiKey | None) -> Iterator["Share"]:
        """Count a call of the key while it runs: as one request, until `Share.grow` says how many it makes.

        Raises:
            ApiError: see `Share.grow`.
        """
        share = Share(key, self._rates, self._num_running)
        share.grow(1)
        try:
            yield share
        finally:
            share.end()


class Share:
    """The share of its key's limits that one call takes. Each choice of each prompt counts as a request."""

    def __init__(self, key: ApiKey | None, rates: MovingWindowRateLimiter, num_running: dict[str, int]) -> None:
        """num_running: requests of every key by its name; counted here."""
        self._key, self._rates, self._num_running = key, rates, num_running
        self._num_counted = 0

    def grow(self, num_requests: int) -> None:
        """Count so many requests in all from now on.

        Raises:
            ApiError: 429 with Retry-After, the key has as many as it may, or has sent as many in its time; 400, it
                never may have so many.
        """
        key, more = self._key, num_requests - self._num_counted
        if key is None or more <= 0:
            return
        allowed = min(key.concurrency or num_requests, num_requests if key.rate is None else key.rate.amount)
        if num_requests > allowed:
            raise ApiError(400, f"n: {num_requests} choices of all prompts given, {allowed} may be asked of this key")
        running = self._num_running.get(key.name, 0)
        if key.concurrency is not None and running + more > key.concurrency:
            wanted = "" if more == 1 else f" and {more} more are asked for"
            message = f"{running} requests of this key are running{wanted}, {key.concurrency} may; try later"
            raise ApiError(429, message, code="concurrency_limit", headers=_SOON)
        if key.rate is not None and not self._rates.hit(key.rate, key.name, cost=more):
            reset_time = self._rates.get_window_stats(key.rate, key.name).reset_time
            wait_s = max(1, math.ceil(reset_time - time.time()))
            message = f"this key may send {key.rate}; try again in {wait_s} s"
            raise ApiError(429, message, code="rate_limit_exceeded", headers={"Retry-After": str(wait_s)})
        self._num_running[key.name] = running + more
        self._num_counted = num_requests

    def end(self) -> None:
        """The call has ended."""
        if self._key is not None:
            self._num_running[self._key.name] -= self._num_counted
            self._num_counted = 0
