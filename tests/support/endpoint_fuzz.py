"""Requests made from the endpoint's own /openapi.json, the same in every run: valid ones and broken ones."""

import collections
from collections.abc import Callable
from typing import Any

import hypothesis
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode

from support.waiting import PATIENCE_S

VOCABULARY = 200
"""Token ids of valid requests are below it: the endpoint's description does not know the model's vocabulary."""
MOST_TOKENS = 2
"""Output tokens of a generated request, so that thousands do not take hours."""


def fuzz(base_url: str, num_cases: int, seed: int = 0) -> collections.Counter[int]:
    """Send so many generated requests; how often each status was answered. The same seed sends the same ones.

    Raises:
        AssertionError: a 5xx, but for a deadline that the request has set itself. requests.RequestException: the
            connection was lost, or nothing came.
    """
    statuses: collections.Counter[int] = collections.Counter()
    schema = schemathesis.openapi.from_url(f"{base_url}/openapi.json")
    operations = [found.ok() for found in schema.get_all_operations()]
    with_body = [operation for operation in operations if operation.method == "post"]
    with requests.Session() as session:
        for operation in operations:
            if operation.method != "post":
                _send(session, base_url, operation.as_strategy(), 5, seed, statuses)
        rest = num_cases - statuses.total()
        for operation in with_body:
            for mode, share in ((GenerationMode.POSITIVE, 6), (GenerationMode.NEGATIVE, 2)):
                strategy = operation.as_strategy(generation_mode=mode)
                if mode is GenerationMode.POSITIVE:
                    strategy = strategy.map(_with_known_tokens)
                _send(session, base_url, strategy, rest * share // 32, seed, statuses)
    return statuses


def _send(
    session: requests.Session, base_url: str, cases: Any, count: int, seed: int, statuses: collections.Counter[int]
) -> None:
    @hypothesis.seed(seed)
    @settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=cases, num_fields=st.integers(0, 4), first=st.integers(0, 40))
    def send(case: Any, num_fields: int, first: int) -> None:
        body = case.body
        if isinstance(body, dict) and body.keys() & {"prompt", "messages"}:
            _keep_few(body, num_fields, first)
            body |= {name: MOST_TOKENS for name in ("max_tokens", "max_completion_tokens") if _is_large(body, name)}
        response = case.call(base_url=base_url, session=session, timeout=PATIENCE_S)
        statuses[response.status_code] += 1
        assert response.status_code < 500, f"{response.status_code} for {body!r}: {response.text}"

    run: Callable[[], None] = send
    run()


def _with_known_tokens(case: Any) -> Any:
    if isinstance(case.body, dict):
        for name in {"prompt", "tokens", "stop_token_ids", "allowed_token_ids"} & case.body.keys():
            case.body[name] = _known(case.body[name])
    return case


def _known(value: Any) -> Any:
    if isinstance(value, list):
        return [_known(each) for each in value]
    return value % VOCABULARY if isinstance(value, int) and not isinstance(value, bool) else value


def _keep_few(body: dict[str, Any], num_fields: int, first: int) -> None:
    """Leave out most fields that a request need not have: nearly all requests would have a wrong one."""
    names = sorted(body.keys() - {"prompt", "messages"})
    begin = first % max(len(names), 1)
    kept = (names[begin:] + names[:begin])[:num_fields]
    for name in set(names).difference(kept):
        del body[name]


def _is_large(body: dict[str, Any], name: str) -> bool:
    value = body.get(name)
    if value is None:
        return name == "max_tokens"
    return isinstance(value, int) and value > MOST_TOKENS
